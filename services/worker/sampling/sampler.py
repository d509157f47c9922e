"""Samples one token for each position of a step, in the order that the package's docstring gives.

    raw logits ── finite? ── masks and features edit a copy ── greedy: argmax
                                                  └─ else: draw

A position that is greedy and has no mask and no feature costs its share of one argmax over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernels.largest import reference
from services.worker.sampling.bias import LogitBias
from services.worker.sampling.counter import key, signed
from services.worker.sampling.draw import Cut, Drawing
from services.worker.sampling.feature import Feature, Position
from services.worker.sampling.logprobs import candidates
from services.worker.sampling.masks import AllowedIds, BannedSequences, MinTokens, forbid
from services.worker.sampling.penalties import Penalties
from services.worker.step import ROW_NO_TOKEN, ROW_NOT_FINITE, ROW_OK, Candidate, NewRow, SamplingParams

GREEDY_UP_TO = 1e-4
"""Temperatures up to it are greedy: a token whose logit is 0.001 behind would win once in 20,000 times."""


class Sampled(NamedTuple):
    """What one position gave; `token` is None unless the status is ROW_OK."""

    status: int
    token: int | None
    logprobs: tuple[Candidate, ...] = ()


_NOT_FINITE = Sampled(ROW_NOT_FINITE, None)


class Sampler:
    """The parameters of each row, and the features that edit its logits."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        largest: Callable[[torch.Tensor], tuple[list[int], list[float]]] = reference.largest,
    ) -> None:
        self._vocab_size = vocab_size
        self._params: dict[int, SamplingParams] = {}
        self._greedy: set[int] = set()  # rows whose token is the likeliest of the raw logits
        self._logprobs: dict[int, int] = {}  # how many of the likeliest a row wants besides its token
        self._largest = largest
        self._drawing = Drawing(vocab_size, device)
        self._features: tuple[Feature[Any], ...] = (
            AllowedIds(device),
            BannedSequences(device),
            MinTokens(device),
            LogitBias(device),
            Penalties(device, vocab_size),
        )

    def add(self, new: NewRow) -> None:
        """A request is put on a row."""
        self.free(new.row)
        self._params[new.row] = new.sampling
        for feature in self._features:
            feature.add(new)
        if new.sampling.temperature <= GREEDY_UP_TO and not any(each.edits(new.row) for each in self._features):
            self._greedy.add(new.row)
        if new.sampling.logprobs is not None:
            self._logprobs[new.row] = new.sampling.logprobs

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._params.pop(row, None)
        self._greedy.discard(row)
        self._logprobs.pop(row, None)
        for feature in self._features:
            feature.free(row)

    def params(self, row: int) -> SamplingParams:
        """How the tokens of the row are chosen."""
        return self._params[row]

    def sample(self, logits_NV: torch.Tensor, positions: Sequence[Position]) -> list[Sampled]:
        """One result per position."""
        best, best_values = self._largest(logits_NV)
        sampled = [
            Sampled(ROW_OK, token) if math.isfinite(value) else _NOT_FINITE
            for token, value in zip(best, best_values, strict=True)
        ]
        chosen = [
            index
            for index, position in enumerate(positions)
            if (position.row not in self._greedy or position.mask is not None) and sampled[index] is not _NOT_FINITE
        ]
        if chosen:
            picked = self._pick(logits_NV[chosen], [positions[index] for index in chosen])
            for index, token in zip(chosen, picked, strict=True):
                sampled[index] = Sampled(ROW_NO_TOKEN, None) if token is None else Sampled(ROW_OK, token)
        if self._logprobs:
            self._add_logprobs(sampled, logits_NV, positions)
        return sampled

    def _pick(self, logits_NV: torch.Tensor, positions: Sequence[Position]) -> list[int | None]:
        """Tokens of positions that need more than an argmax of the raw logits; None where nothing may be sampled."""
        forbid(logits_NV, positions)
        for feature in self._features:
            feature.apply(logits_NV, positions)
        best, best_values = self._largest(logits_NV)
        possible = [value > -math.inf for value in best_values]
        picked: list[int | None] = [token if ok else None for token, ok in zip(best, possible, strict=True)]
        cuts = {
            index: self._cut(position)
            for index, position in enumerate(positions)
            if possible[index] and self._params[position.row].temperature > GREEDY_UP_TO
        }
        if cuts:
            drawn = list(cuts)
            few = len(drawn) < len(positions)
            logits = logits_NV[drawn] if few else logits_NV
            values = torch.tensor([best_values[index] for index in drawn], device=logits_NV.device)
            tokens_drawn = self._drawing.draw(logits, values.unsqueeze(-1), list(cuts.values()))
            for index, token in zip(drawn, tokens_drawn, strict=True):
                picked[index] = token
        return picked

    def _cut(self, position: Position) -> Cut:
        params = self._params[position.row]
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        noise = signed(key(params.seed, len(position.tokens)))
        return Cut(noise, params.temperature, top_k, params.top_p, params.min_p)

    def _add_logprobs(self, sampled: list[Sampled], logits_NV: torch.Tensor, positions: Sequence[Position]) -> None:
        asked = [
            (index, result.token, top)
            for index, result in enumerate(sampled)
            if result.token is not None and (top := self._logprobs.get(positions[index].row)) is not None
        ]
        if asked:
            indices = [index for index, _, _ in asked]
            raw_NV = logits_NV if len(indices) == len(positions) else logits_NV[indices]
            found = candidates(raw_NV, [token for _, token, _ in asked], [top for _, _, top in asked])
            for index, entries in zip(indices, found, strict=True):
                sampled[index] = sampled[index]._replace(logprobs=entries)
