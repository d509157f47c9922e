"""Steps on a device that is not waited for until the step behind is on its way.

    step thread     take rows ▸ copy up ▸ stage ▸ gather ▸ forward ▸ [masks] ▸ sample ▸ append ▸ copy down │ next step
    device             stage ▸ gather ▸ forward ......................... ▸ sample ▸ append ▸ copy down    │ next step
    output thread                                                                       wait ▸ settle ▸ StepOutput

The tables of ids and blocks lie on the device (kernels/states): the ids that a step samples are the next one's input
without a way over the host. What the host knows when it launches, and what is settled when it waits: device_states.
A step that asks for log probabilities of its prompt or for a pooled vector waits inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.attention.rows import Placed
from kernels.on_device import OnDevice
from kernels.ops import MediaTensors
from kernels.states.reference import Gathered
from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.device_link import Arriving, Link
from services.worker.device_sampling import Columns, DeviceSampler, Places, Wish, with_masks
from services.worker.device_states import DeviceStates, Row
from services.worker.models.decoder import Decoder
from services.worker.multimodal import Multimodal
from services.worker.pooling import Pooler
from services.worker.prompt_logprobs import PromptScores
from services.worker.readings import Read, read
from services.worker.sampling.draw import Drawing
from services.worker.sampling.logprobs import candidates
from services.worker.sampling.sampler import Sampled
from services.worker.states import Span, epoch_of, refused, sampling_places, take_rows
from services.worker.step import (
    MASKED,
    POOLS,
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_OK,
    SAMPLES,
    CacheShape,
    Masks,
    RowResult,
    StepFailed,
    StepInput,
    StepOutput,
)

_NOBODY = -1  # a row that takes nothing in


@dataclass(slots=True, eq=False)
class Launched:
    """A step on its way: a Pending of services.worker.step."""

    step: StepInput
    spans: list[Span]
    rows: list[Row]  # of the spans
    wish: Wish
    takes: list[bool]  # of the wish's spans: whether the row takes in what was sampled
    promised: list[int]  # of the wish's spans
    results: dict[int, RowResult]  # by row, as far as they are known
    found: Read
    missing: tuple[bytes, ...]
    arriving: Arriving
    settle: Callable[[Launched], StepOutput]
    output: StepOutput | None = None

    def wait(self) -> StepOutput:
        """See Pending."""
        return self.settle(self)


class DeviceSteps:
    """The rows of one KV cache, and the steps on them."""

    def __init__(
        self, model: Decoder, cache: KVCache, shape: CacheShape, beside: tuple[Pooler, Multimodal], logits_rows: int
    ) -> None:
        """`beside` are the rows that pool and those that have media."""
        ops = model.ops.on_device
        assert ops is not None
        self._model = model
        self._ops: OnDevice = ops
        self._cache = cache
        self._pooler, self._media = beside
        self._logits_rows = logits_rows
        self._states = DeviceStates(shape, model.device)
        self._sampler = DeviceSampler(model.config.vocab_size, shape, model.device, ops)
        selection = model.ops.selection or Drawing(model.config.vocab_size, model.device)
        self._prompt_scores = PromptScores(model, partial(candidates, selection=selection), logits_rows)
        self._link = Link(model.device)
        self._room = _room(shape.max_num_batched_tokens, shape, model.device)
        self._in_flight: deque[Launched] = deque()
        self._settling = Lock()

    def clear(self) -> None:
        """Empties all rows; what is in flight settles nothing any more."""
        for row in self._states.clear():
            self._sampler.free(row)

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput | Launched:
        """See Runner.execute."""
        take_rows(step, (self._states, self._sampler, self._pooler, self._media))
        missing = self._media.encode(step)
        for launched in self._states.drafted(step):
            self._settle(launched)
        self._states.grow(step)
        self._states.lay_drafts(step)
        spans, bad = self._states.spans(step)
        spans, faults, lacked = self._media.readable(spans)
        missing = tuple(dict.fromkeys(missing + lacked))
        results = refused(self._states.request, bad, faults)
        if not spans:
            self._stage_alone()
            return StepOutput(step.step_id, tuple(results.values()), missing_media=missing)
        launched = self._launch(step, spans, masks)
        launched.results |= results
        launched.missing = missing
        return launched

    def _stage_alone(self) -> None:
        writes = self._states.take_writes()
        if writes.longest:
            there = self._link.up(writes[:2])
            self._ops.stage(there[0], there[1], self._states.tables, writes.longest)

    def _launch(self, step: StepInput, spans: list[Span], masks: Callable[[], Masks]) -> Launched:
        wishes = int(np.bitwise_or.reduce(step.flags))  # what some row asks for
        rows = self._states.rows(spans)
        asked, asked_rows = spans, rows
        if not all(span.flags & SAMPLES for span in spans):
            asked = [span for span in spans if span.flags & SAMPLES]
            asked_rows = self._states.rows(asked)
        masked = any(span.flags & MASKED for span in asked)
        wish = self._sampler.wish(asked, masked)
        with self._states.lock:
            takes = [
                span.end - span.drafts == row.settled + row.promised
                for span, row in zip(asked, asked_rows, strict=True)
            ]
        appends_C4 = _appends(asked, takes)
        batch, places, appended = self._go_up(spans, wish, appends_C4)
        words, out = self._sampler.blank(wish.words)
        found = Read()
        if wishes == SAMPLES and self._only_likeliest(batch, asked):
            self._sampler.take_likeliest(self._model.pairs(batch, self._cache), out)
        else:
            hidden_TD = self._model.forward(batch, self._cache)
            if wishes & (PROMPT_LOGPROBS | POOLS) or self._pooler.held:
                found = read(self._prompt_scores, self._pooler, self._states.request, spans, hidden_TD)
            given = masks() if masked else {}
            lost = [span.row in found.results or (span.row in given and given[span.row] is None) for span in asked]
            if any(lost):
                takes = [take and not gone for take, gone in zip(takes, lost, strict=True)]
                (appended,) = self._link.up([_appends(asked, takes)])
            with_masks(wish, given)
            self._sample(batch.sampled(hidden_TD), wish, places, out)
            for span in asked:
                if span.row in given and given[span.row] is None and span.row not in found.results:
                    found.results[span.row] = RowResult(span.row, epoch_of(self._states.request(span.row)), ROW_DROPPED)
        if asked:
            drafts = max(span.drafts for span in asked)
            self._sampler.append(appended, out, self._states.tables.tokens_RL, drafts)
        arriving = self._link.down(words)
        launched = Launched(step, spans, rows, wish, takes, [], dict(found.results), found, (), arriving, self._settle)
        self._promise(launched, asked_rows)
        self._in_flight.append(launched)
        return launched

    def _go_up(
        self, spans: list[Span], wish: Wish, appends_C4: NDArray[np.int32]
    ) -> tuple[Batch, Places, torch.Tensor]:
        """One copy of all that the host has to say of a step, and the flat batch that the device makes of it."""
        counts = [span.end - span.start for span in spans]
        starts = [0, *accumulate(counts)]
        total = starts[-1]
        shifts = self._media.shifts(spans)
        columns = (
            [span.row for span in spans],
            [span.start for span in spans],
            counts,
            starts[:-1],
            [span.first_writable for span in spans],
            shifts or [0] * len(spans),
        )
        all_of_them = len(wish.lengths_P) == total
        logits_at = [] if all_of_them else sampling_places(spans)
        writes = self._states.take_writes()
        media = _NO_MEDIA if shifts is not None else self._read_media(spans, starts)
        sent: list[NDArray[Any]] = [writes.writes_W5, writes.values_N, np.array(columns, np.int32).T, appends_C4]
        sent += [np.array(logits_at, np.int64), wish.wanted_W, wish.wholes_P3, wish.parts_P3, *media.arrays]
        there = self._link.up(sent)
        writes_W5, values_N, spans_S6, appended, logits_at_S, wanted_W, wholes_P3, parts_P3 = there[:8]
        tables = self._states.tables
        if writes.longest:
            self._ops.stage(writes_W5, values_N, tables, writes.longest)
        contexts = [span.end for span in spans]
        held = -(-max(contexts) // tables.block_size)
        room = self._room_for(total)
        self._ops.gather(spans_S6, tables, room, max(held, *counts))
        count = len(spans)
        batch = Batch(
            input_ids_T=room.ids_T[:total],
            positions_T=room.positions_T[:total],
            slots_T=room.slots_T[:total],
            row_starts=tuple(starts),
            context_lens=tuple(contexts),
            block_table_RB=room.table_SB[:count, :held],
            logits_at_S=None if all_of_them else logits_at_S,
            placed=Placed(room.starts_S1[: count + 1], room.contexts_S[:count]),
        )
        places = Places(tables.tokens_RL, (wholes_P3, parts_P3) if wish.drawn else None, wanted_W)
        return media.put(batch, there[8:]), places, appended

    def _read_media(self, spans: list[Span], starts: list[int]) -> _Media:
        positions_T = np.concatenate([np.arange(span.start, span.end) for span in spans])
        found = self._media.read(spans, starts, positions_T)
        if found is None:
            return _Media((positions_T,))
        return _Media((positions_T, found.positions_3T.numpy(), found.places_M.numpy()), found.rows_MPD)

    def _room_for(self, tokens: int) -> Gathered:
        if tokens > len(self._room.ids_T):
            wider = (torch.empty(tokens, dtype=torch.int64, device=self._model.device) for _ in range(3))
            ids_T, positions_T, slots_T = wider
            self._room = self._room._replace(ids_T=ids_T, positions_T=positions_T, slots_T=slots_T)
        return self._room

    def _only_likeliest(self, batch: Batch, asked: list[Span]) -> bool:
        """Whether the largest logit at every token of the batch is all that it is for: most steps are so."""
        if batch.logits_at_S is not None or len(batch.input_ids_T) > self._logits_rows:
            return False
        return not self._pooler.held and self._sampler.plain(asked)

    def _sample(self, hidden_PD: torch.Tensor, wish: Wish, places: Places, out: Columns) -> None:
        for chunk in self._sampler.chunks(wish, self._logits_rows):
            x_PV = self._model.logits(hidden_PD[chunk.begin : chunk.end])
            self._sampler.sample(x_PV, chunk, wish, places, out)

    def _promise(self, launched: Launched, rows: list[Row]) -> None:
        """What the rows of the wish will have once the step is done, as far as the host can know."""
        most = self._states.max_len
        with self._states.lock:
            for span, row, takes in zip(launched.wish.spans, rows, launched.takes, strict=True):
                promised = 0
                if takes and span.drafts:
                    row.drafted = launched
                elif takes and row.settled + row.promised < most:
                    promised = 1
                    row.promised += 1
                launched.promised.append(promised)

    def _settle(self, launched: Launched) -> StepOutput:
        """Waits for a step, and before it for those in front of it."""
        with self._settling:
            while launched.output is None:
                if not self._in_flight:
                    raise StepFailed("a step before it failed on the device")
                first = self._in_flight.popleft()
                first.output = self._finish(first)
            return launched.output

    def _finish(self, launched: Launched) -> StepOutput:
        words = launched.arriving.wait()
        sampled, counted = self._sampler.read(words, launched.wish)
        results = launched.results
        first = place = 0
        with self._states.lock:
            for span, row in zip(launched.spans, launched.rows, strict=True):
                broken = span.end - span.drafts > row.settled
                if broken:
                    results[span.row] = RowResult(span.row, row.request.epoch, ROW_FAILED)
                if not span.flags & SAMPLES:
                    continue
                count = 0 if broken else counted[place]
                self._settle_row(row, launched, place, count)
                if span.row not in results:
                    results[span.row] = _result(span, row, sampled[first : first + max(1, count)], taken=count > 0)
                place += 1
                first += span.drafts + 1
        ordered = tuple([results[row] for row in launched.step.rows.tolist() if row in results])
        found = launched.found
        prompts, pooled = tuple(found.prompts), tuple(found.pooled)
        return StepOutput(launched.step.step_id, ordered, prompts, pooled, missing_media=launched.missing)

    def _settle_row(self, row: Row, launched: Launched, place: int, count: int) -> None:
        row.promised -= launched.promised[place]
        row.settled = min(row.settled + count, self._states.max_len)
        if row.drafted is launched:
            row.drafted = None


@dataclass(slots=True, frozen=True)
class _Media:
    """What a batch reads of media besides its tables: positions, those on three axes, and who reads which rows."""

    arrays: tuple[NDArray[np.int64], ...] = ()
    rows_MPD: torch.Tensor | None = None

    def put(self, batch: Batch, there: Sequence[torch.Tensor]) -> Batch:
        """The batch with them; `there` are the arrays on the device."""
        if not there:
            return batch
        media = None if self.rows_MPD is None else MediaTensors(there[1], there[2], self.rows_MPD)
        return replace(batch, positions_T=there[0], media=media)


_NO_MEDIA = _Media()


def _room(tokens: int, shape: CacheShape, device: torch.device) -> Gathered:
    """Where batches are gathered, always at the same addresses."""
    blocks = -(-shape.max_model_len // shape.block_size)

    def numbers(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    return Gathered(
        numbers(torch.int64, tokens),
        numbers(torch.int64, tokens),
        numbers(torch.int64, tokens),
        numbers(torch.int32, shape.max_num_seqs + 1),
        numbers(torch.int32, shape.max_num_seqs),
        numbers(torch.int32, shape.max_num_seqs, blocks),
    )


def _appends(asked: list[Span], takes: list[bool]) -> NDArray[np.int32]:
    """(row, ids known, drafts, first position) of each span that samples."""
    numbers: list[tuple[int, int, int, int]] = []
    first = 0
    for span, take in zip(asked, takes, strict=True):
        numbers.append((span.row if take else _NOBODY, span.end - span.drafts, span.drafts, first))
        first += span.drafts + 1
    return np.array(numbers, np.int32).reshape(-1, 4)


def _result(span: Span, row: Row, sampled: list[Sampled], *, taken: bool) -> RowResult:
    """What a span that samples gave; one whose row took nothing in has failed, if its logits are not to blame."""
    epoch = row.request.epoch
    if not taken:
        return RowResult(span.row, epoch, sampled[0].status or ROW_FAILED)
    tokens = tuple([each.token for each in sampled if each.token is not None])
    logprobs = tuple([each.logprobs for each in sampled]) if sampled[0].logprobs else ()
    return RowResult(span.row, epoch, ROW_OK, tokens, logprobs)
