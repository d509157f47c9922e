"""Log probabilities of the tokens of a prompt, from the hidden states of the step that computes what stands before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from services.worker.models.decoder import Decoder
from services.worker.states import Span, ends
from services.worker.step import PROMPT_LOGPROBS, ROW_NOT_FINITE, Candidate, NewRow, PromptLogprobs, RowResult

Candidates = Callable[[torch.Tensor, Sequence[int], Sequence[int]], list[tuple[Candidate, ...]]]
"""(logits_NV, tokens, how many of the likeliest) -> of each row its token, then the likeliest."""


class PromptScores:
    """Of one model, at most `logits_rows` positions at once."""

    def __init__(self, model: Decoder, candidates: Candidates, logits_rows: int) -> None:
        self._model = model
        self._candidates = candidates
        self._logits_rows = logits_rows

    def of(
        self, request_of: Callable[[int], NewRow | None], spans: Sequence[Span], hidden_TD: torch.Tensor
    ) -> Iterator[PromptLogprobs | RowResult]:
        """Of the tokens behind those computed, as far as they are in the prompt, for the rows that ask.

        A row whose logits are not finite has failed instead.
        """
        for span, last in zip(spans, ends(spans), strict=True):
            request = request_of(span.row)
            if not span.flags & PROMPT_LOGPROBS or request is None or request.sampling.prompt_logprobs is None:
                continue
            count = max(0, min(span.end, request.prompt_len - 1) - span.start)
            first = last + 1 - (span.end - span.start)
            tokens = request.tokens[span.start + 1 : span.start + count + 1].tolist()
            entries = self._entries(hidden_TD[first : first + count], tokens, request.sampling.prompt_logprobs)
            if entries is None:
                yield RowResult(span.row, request.epoch, ROW_NOT_FINITE)
            elif span.start:
                yield PromptLogprobs(span.row, request.epoch, span.start + 1, tuple(entries))
            else:  # nothing stands before the first token
                yield PromptLogprobs(span.row, request.epoch, 0, ((), *entries))

    def _entries(self, hidden_ND: torch.Tensor, tokens: list[int], top: int) -> list[tuple[Candidate, ...]] | None:
        """None where some logit is not finite."""
        entries: list[tuple[Candidate, ...]] = []
        for begin in range(0, len(tokens), self._logits_rows):
            some = tokens[begin : begin + self._logits_rows]
            logits_NV = self._model.logits(hidden_ND[begin : begin + len(some)])
            if not bool(torch.isfinite(logits_NV).all()):
                return None
            entries += self._candidates(logits_NV, some, [top] * len(some))
        return entries
