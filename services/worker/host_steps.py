"""Steps of which everything is known on the host when they end: rows → flat batch → forward → [masks] → sample.

What runs on a CPU runs so: nothing would be won by waiting for later.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.models.decoder import Decoder
from services.worker.multimodal import Multimodal
from services.worker.pooling import Pooler
from services.worker.prompt_logprobs import PromptScores
from services.worker.readings import Read, read
from services.worker.sampling.feature import Position
from services.worker.sampling.sampler import Sampled, Sampler
from services.worker.speculative import accept, positions
from services.worker.states import Span, States, epoch_of, refused, sampling_places, take_rows
from services.worker.step import (
    MASKED,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_OK,
    SAMPLES,
    CacheShape,
    Masks,
    RowResult,
    StepInput,
    StepOutput,
)


class HostSteps:
    """The rows of one KV cache, and the steps on them."""

    def __init__(
        self, model: Decoder, cache: KVCache, shape: CacheShape, beside: tuple[Pooler, Multimodal], logits_rows: int
    ) -> None:
        """`beside` are the rows that pool and those that have media."""
        self._model = model
        self._cache = cache
        self._states = States(shape)
        self._sampler = Sampler(model.config.vocab_size, model.device, model.ops.selection)
        self._pooler, self._media = beside
        self._logits_rows = logits_rows
        self._prompt_scores = PromptScores(model, self._sampler.candidates, logits_rows)

    def clear(self) -> None:
        """Empties all rows."""
        for row in self._states.clear():
            self._sampler.free(row)

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput:
        """See Runner.execute."""
        model, states, sampler = self._model, self._states, self._sampler
        spent_s = model.ops.spent_s()
        take_rows(step, (states, sampler, self._pooler, self._media))
        states.grow(step)
        states.lay_drafts(step)
        missing = self._media.encode(step)
        spans, bad = states.spans(step)
        spans, faults, lacked = self._media.readable(spans)
        missing = tuple(dict.fromkeys(missing + lacked))
        results = refused(states.request, bad, faults)
        if not spans:
            return StepOutput(step.step_id, tuple(results.values()), missing_media=missing)
        wishes = functools.reduce(operator.or_, step.flags.tolist())  # what some row asks for
        asked = [span for span in spans if span.flags & SAMPLES]
        batch = self._media.merge(spans, states.batch(spans, sampling_places(spans)))
        masked = any(span.flags & MASKED for span in asked)
        likeliest = not masked and sampler.take_likeliest([span.row for span in asked])  # most steps are so
        found = Read()
        if likeliest and wishes == SAMPLES and self._samples_all(batch):
            sampled = _by_span(asked, sampler.likeliest(*model.likeliest(batch, self._cache)))
        else:
            hidden_TD = model.forward(batch, self._cache)
            found = read(self._prompt_scores, self._pooler, states.request, spans, hidden_TD)
            results |= found.results
            hidden_SD = batch.sampled(hidden_TD)
            if likeliest:
                sampled = _by_span(asked, self._likeliest(hidden_SD))
            else:
                sampled = self._sample(asked, hidden_SD, masks() if masked else {})
        for span, tokens in zip(asked, sampled, strict=True):
            if span.row not in results:
                results[span.row] = _take(states, span, tokens)
        ordered = [results[row] for row in step.rows.tolist() if row in results]
        spent_s = model.ops.spent_s() - spent_s
        return StepOutput(step.step_id, tuple(ordered), tuple(found.prompts), tuple(found.pooled), spent_s, missing)

    def _samples_all(self, batch: Batch) -> bool:
        """Whether every token of the batch is sampled, and no more of them than may be at once."""
        return batch.logits_at_S is None and len(batch.input_ids_T) <= self._logits_rows

    def _likeliest(self, hidden_SD: torch.Tensor) -> list[Sampled]:
        """What each position gives where the largest logit is all that it is for: then there are no logits."""
        likeliest, of = self._sampler.likeliest, self._model.likeliest_of
        return [each for some_SD in torch.split(hidden_SD, self._logits_rows) for each in likeliest(*of(some_SD))]

    def _sample(self, spans: list[Span], hidden_SD: torch.Tensor, masks: Masks) -> Iterator[list[Sampled]]:
        """What each span gives at each of its positions, in order; nothing where its result is to be dropped."""
        places: list[Position] = []
        rows_of_S: list[int] = []
        first = 0
        for span in spans:
            mask = masks.get(span.row)
            if mask is not None or span.row not in masks:
                places += positions(self._states, span, mask)
                rows_of_S += range(first, first + span.drafts + 1)
            first += span.drafts + 1
        if len(places) < first:
            hidden_SD = hidden_SD[rows_of_S]
        most = self._logits_rows
        sampled: list[Sampled] = []
        for begin in range(0, len(places), most):
            logits_NV = self._model.logits(hidden_SD[begin : begin + most])
            sampled += self._sampler.sample(logits_NV, places[begin : begin + most])
        results = iter(sampled)
        for span in spans:
            dropped = span.row in masks and masks[span.row] is None
            yield [] if dropped else list(islice(results, span.drafts + 1))


def _by_span(spans: list[Span], sampled: list[Sampled]) -> Iterator[list[Sampled]]:
    """What each span gives, of what all their positions give in order."""
    first = 0
    for span in spans:
        yield sampled[first : first + span.drafts + 1]
        first += span.drafts + 1


def _take(states: States, span: Span, sampled: list[Sampled]) -> RowResult:
    """Appends the tokens that count to the row; they are its answer."""
    epoch = epoch_of(states.request(span.row))
    if not sampled:
        return RowResult(span.row, epoch, ROW_DROPPED)
    known = states.length(span.row)
    if sampled[0].token is None or span.end - span.drafts != known:
        return RowResult(span.row, epoch, sampled[0].status or ROW_FAILED)
    counted = sampled
    if span.drafts:
        counted = accept(states.tokens(span.row, span.end)[known:].tolist(), sampled)
    tokens = tuple([result.token for result in counted if result.token is not None])
    states.append(span.row, tokens)
    logprobs = tuple([result.logprobs for result in counted]) if counted[0].logprobs else ()
    return RowResult(span.row, epoch, ROW_OK, tokens, logprobs)
