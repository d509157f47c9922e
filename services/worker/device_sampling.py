"""Sampling of which the host sees nothing until the step is waited for: parameters go up, words come down.

    parameters of rows, lengths ── Wish ──▶ device: logits ▶ largest ▶ edits ▶ largest ▶ sample ▶ log probabilities
    words: tokens, largest logits before and after edits, how many tokens count, log probabilities ──▶ Sampled

The order of operations, and what each gives, is that of services/worker/sampling. The host knows of each position its
row, how many ids stand before it and so its noise; the ids themselves edits read on the device.

P positions   C spans that sample   W positions with log probabilities   K likeliest of them at most   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.on_device import OnDevice
from kernels.states.reference import Chosen
from services.worker.sampling.counter import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, mix
from services.worker.sampling.device import DeviceFeatures, DevicePosition
from services.worker.sampling.logprobs import ranked
from services.worker.sampling.sampler import GREEDY_UP_TO, Sampled
from services.worker.states import Span
from services.worker.step import ROW_NO_TOKEN, ROW_NOT_FINITE, ROW_OK, CacheShape, Candidate, Int32, Masks, NewRow


@dataclass(slots=True)
class Wish:
    """What one step samples. P is the sum of 1 + drafts over the spans."""

    spans: list[Span]
    lengths_P: NDArray[np.int64]  # ids that stand before each
    wholes_P3: NDArray[np.int64]
    parts_P3: NDArray[np.float64]
    drawn: bool  # whether any is
    cuts: bool  # whether any has cutoffs
    edited: list[DevicePosition]  # all, where masks or features may edit some; else none
    wanted_W: NDArray[np.int64]  # positions with log probabilities
    tops_W: list[int] = field(default_factory=list)  # how many of the likeliest each wants

    @property
    def words(self) -> Words:
        """Where the answer lies."""
        return Words(
            len(self.lengths_P), len(self.spans), bool(self.edited), len(self.tops_W), max(self.tops_W, default=0)
        )


class Words(NamedTuple):
    """The layout of what comes down: int32 words, one column behind the other."""

    positions: int
    spans: int
    edits: bool
    wanted: int
    most: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each column: see `columns`."""
        positions, wanted = self.positions, self.wanted
        lists = wanted * self.most
        return positions, 2 * positions, 2 * positions * self.edits, self.spans, *(wanted,) * 3, lists, lists


class Columns(NamedTuple):
    """Of tensors or arrays. A pair is a place and the bits of a float32; so are logits, totals and values."""

    tokens_P: Any
    raw_P2: Any
    edited_P2: Any  # empty where nothing is edited
    counted_C: Any
    logits_W: Any
    totals_W: Any
    ranks_W: Any
    values_WK: Any
    ids_WK: Any


class Places(NamedTuple):
    """What of a wish lies on the device."""

    tokens_RL: torch.Tensor  # the table of ids
    draws: tuple[torch.Tensor, torch.Tensor] | None  # wholes_P3 and parts_P3; None: all are greedy
    wanted_W: torch.Tensor


class Chunk(NamedTuple):
    """Positions whose logits exist at once, and which of those with log probabilities are among them."""

    begin: int
    end: int
    wanted_begin: int
    wanted_end: int


class DeviceSampler:
    """The parameters of each row."""

    def __init__(self, vocab_size: int, shape: CacheShape, device: torch.device, ops: OnDevice) -> None:
        """Takes memory for penalties on every row: a step that asks for more than was planned could fail."""
        rows = shape.max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops
        self._features = DeviceFeatures(vocab_size, device, ops.logits)
        self._features.reserve(rows, shape.max_model_len)
        self._seeds_R = np.zeros(rows, np.uint64)  # mixed once
        self._wholes_R3 = np.zeros((rows, 3), np.int64)
        self._parts_R3 = np.ones((rows, 3), np.float64)
        self._cuts_R = np.zeros(rows, np.bool_)
        self._logprobs: dict[int, int] = {}
        self._edited: set[int] = set()  # rows whose logits features edit
        self._plain: set[int] = set()  # rows that are greedy, not edited, and want no log probabilities

    def add(self, new: NewRow) -> None:
        """A request is put on a row."""
        self.free(new.row)
        self._features.add(new)
        params, row, all_of_them = new.sampling, new.row, self._vocab_size
        greedy = params.temperature <= GREEDY_UP_TO
        top_k = params.top_k if 0 < params.top_k < all_of_them else all_of_them
        self._seeds_R[row] = mix(params.seed + GOLDEN)
        self._wholes_R3[row] = (not greedy, 0, top_k)
        low = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self._parts_R3[row] = (params.temperature, params.top_p, low)
        self._cuts_R[row] = not greedy and (top_k < all_of_them or params.top_p < 1 or params.min_p > 0)
        if params.logprobs is not None:
            self._logprobs[row] = params.logprobs
        if self._features.edits(row):
            self._edited.add(row)
        if greedy and params.logprobs is None and row not in self._edited:
            self._plain.add(row)

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._features.free(row)
        self._logprobs.pop(row, None)
        self._edited.discard(row)
        self._plain.discard(row)

    def wish(self, spans: list[Span], masked: bool) -> Wish:
        """What spans that sample ask for; `masked`: grammar masks will come for some."""
        rows_C = np.array([span.row for span in spans], np.int64)
        known_C = np.array([span.end - span.drafts for span in spans], np.int64)
        drafts_C = np.array([span.drafts for span in spans], np.int64)
        rows_P = np.repeat(rows_C, drafts_C + 1)
        firsts_C = np.cumsum(drafts_C + 1) - drafts_C - 1
        ahead_P = np.arange(len(rows_P)) - np.repeat(firsts_C, drafts_C + 1)
        lengths_P = np.repeat(known_C, drafts_C + 1) + ahead_P
        wholes_P3 = self._wholes_R3[rows_P]
        drawn = bool(wholes_P3[:, 0].any())
        if drawn:
            wholes_P3[:, 1] = _keys(self._seeds_R[rows_P], lengths_P.astype(np.uint64)).view(np.int64)
        edited: list[DevicePosition] = []
        if masked or not self._edited.isdisjoint(rows_C.tolist()):
            numbers = zip(rows_P.tolist(), lengths_P.tolist(), ahead_P.tolist(), strict=True)
            edited = [DevicePosition(row, length, ahead) for row, length, ahead in numbers]
        wanted: list[tuple[int, int]] = []
        if self._logprobs:
            tops = [self._logprobs.get(row) for row in rows_P.tolist()]
            wanted = [(index, top) for index, top in enumerate(tops) if top is not None]
        return Wish(
            spans,
            lengths_P,
            wholes_P3,
            self._parts_R3[rows_P],
            drawn=drawn,
            cuts=bool(self._cuts_R[rows_P].any()),
            edited=edited,
            wanted_W=np.array([index for index, _ in wanted], np.int64),
            tops_W=[top for _, top in wanted],
        )

    def plain(self, spans: Sequence[Span]) -> bool:
        """Whether the spans need no logits but the largest, as long as they have no masks."""
        return self._plain.issuperset(span.row for span in spans)

    def blank(self, words: Words) -> tuple[torch.Tensor, Columns]:
        """Room for an answer, and its columns."""
        flat = torch.empty(sum(words.sizes), dtype=torch.int32, device=self._device)
        return flat, _columns(torch.split(flat, list(words.sizes)), words)

    def take_likeliest(self, pairs_P2: torch.Tensor, out: Columns) -> None:
        """The answer where the largest logits are all."""
        pairs_P2 = pairs_P2.view(torch.int32)
        out.raw_P2.copy_(pairs_P2)
        out.tokens_P.copy_(pairs_P2[:, 0])

    def chunks(self, wish: Wish, most: int) -> Iterator[Chunk]:
        """The positions, so many at once at most."""
        first = 0
        for begin in range(0, len(wish.lengths_P), most):
            end = min(begin + most, len(wish.lengths_P))
            beyond = int(np.searchsorted(wish.wanted_W, end))
            yield Chunk(begin, end, first, beyond)
            first = beyond

    def sample(self, x_PV: torch.Tensor, chunk: Chunk, wish: Wish, places: Places, out: Columns) -> None:
        """Writes the answer of some positions. Logits are float32, and written to."""
        some = slice(chunk.begin, chunk.end)
        pairs_P2 = self._ops.pairs(x_PV)
        out.raw_P2[some] = pairs_P2.view(torch.int32)
        raw_PV = x_PV
        if wish.edited:
            if chunk.wanted_end > chunk.wanted_begin:
                raw_PV = x_PV.clone()
            self._features.apply(x_PV, wish.edited[some], places.tokens_RL)
            pairs_P2 = self._ops.pairs(x_PV)
            out.edited_P2[some] = pairs_P2.view(torch.int32)
        draws = None
        if places.draws is not None:
            draws = (places.draws[0][some], places.draws[1][some])
        out.tokens_P[some] = self._ops.sample(x_PV, pairs_P2, draws, wish.cuts)
        if chunk.wanted_end > chunk.wanted_begin:
            self._weigh(raw_PV, chunk, places.wanted_W, out)

    def _weigh(self, raw_PV: torch.Tensor, chunk: Chunk, wanted_W: torch.Tensor, out: Columns) -> None:
        """Log probabilities, from the logits before all edits."""
        some = slice(chunk.wanted_begin, chunk.wanted_end)
        tokens_P = out.tokens_P[chunk.begin : chunk.end]
        if chunk.wanted_end - chunk.wanted_begin < chunk.end - chunk.begin:
            at_W = wanted_W[some] - chunk.begin
            raw_PV, tokens_P = raw_PV.index_select(0, at_W), tokens_P.index_select(0, at_W)
        tokens_P = tokens_P.clamp(0, self._vocab_size - 1)  # of a row that is not finite it may be anything
        totals_W, ranks_W = self._ops.weigh(raw_PV, tokens_P)
        out.logits_W[some] = raw_PV.gather(1, tokens_P.long().unsqueeze(1)).squeeze(1).view(torch.int32)
        out.totals_W[some] = totals_W.view(torch.int32)
        out.ranks_W[some] = ranks_W.int()
        most = out.ids_WK.shape[1]
        if most:
            values_WK, ids_WK = self._ops.top(raw_PV, most)
            out.values_WK[some, : values_WK.shape[1]] = values_WK.view(torch.int32)
            out.ids_WK[some, : ids_WK.shape[1]] = ids_WK.int()

    def append(self, spans_C4: torch.Tensor, out: Columns, tokens_RL: torch.Tensor, drafts: int) -> None:
        """Takes the tokens that count into their rows: see kernels.states.reference."""
        raw = out.raw_P2.view(torch.float32)
        edited = out.edited_P2.view(torch.float32) if len(out.edited_P2) else raw
        self._ops.append(spans_C4, Chosen(out.tokens_P, raw, edited), tokens_RL, out.counted_C, drafts)

    def read(self, words: Int32, wish: Wish) -> tuple[list[Sampled], list[int]]:
        """What came down: of each position what it gave, and of each span how many tokens count."""
        layout = wish.words
        found = _columns(np.split(words, np.cumsum(layout.sizes)[:-1]), layout)
        finite = np.isfinite(found.raw_P2[:, 1].view(np.float32))
        left = finite
        if layout.edits:
            left = found.edited_P2[:, 1].view(np.float32) > -np.inf
        logprobs = self._logprobs_of(found, wish)
        tokens = found.tokens_P.tolist()
        if not logprobs and left.all() and finite.all():
            return [Sampled(ROW_OK, token) for token in tokens], found.counted_C.tolist()
        sampled: list[Sampled] = []
        for index, (token, sound, some) in enumerate(zip(tokens, finite.tolist(), left.tolist(), strict=True)):
            if not sound:
                sampled.append(Sampled(ROW_NOT_FINITE, None))
            elif not some:
                sampled.append(Sampled(ROW_NO_TOKEN, None))
            else:
                sampled.append(Sampled(ROW_OK, token, logprobs.get(index, ())))
        return sampled, found.counted_C.tolist()

    def _logprobs_of(self, found: Columns, wish: Wish) -> dict[int, tuple[Candidate, ...]]:
        """By position."""
        if not wish.tops_W:
            return {}
        wanted = wish.wanted_W.tolist()
        tokens = found.tokens_P[wish.wanted_W].tolist()
        logits, totals = found.logits_W.view(np.float32).tolist(), found.totals_W.view(np.float32).tolist()
        values, ids, ranks = found.values_WK.view(np.float32).tolist(), found.ids_WK.tolist(), found.ranks_W.tolist()
        lists: dict[int, tuple[Candidate, ...]] = {}
        for place, index in enumerate(wanted):
            top = min(wish.tops_W[place], self._vocab_size)
            first = Candidate(tokens[place], logits[place] - totals[place], ranks[place])
            lists[index] = (first, *ranked(ids[place][:top], values[place], totals[place]))
        return lists


def with_masks(wish: Wish, masks: Masks) -> None:
    """Gives the positions of a step their masks, which have come; a row whose result is to be dropped gets none."""
    if not masks:
        return
    for index, position in enumerate(wish.edited):
        mask = masks.get(position.row)
        if mask is not None:
            wish.edited[index] = position._replace(mask=mask[position.drafts])


def _columns(columns: Sequence[Any], words: Words) -> Columns:
    found = Columns(*columns)
    return found._replace(
        raw_P2=found.raw_P2.reshape(words.positions, 2),
        edited_P2=found.edited_P2.reshape(words.positions * words.edits, 2),
        values_WK=found.values_WK.reshape(words.wanted, words.most),
        ids_WK=found.ids_WK.reshape(words.wanted, words.most),
    )


def _keys(seeds_P: NDArray[np.uint64], lengths_P: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter.key of many positions, whose seeds are mixed already."""
    x: NDArray[np.uint64] = seeds_P + (lengths_P + np.uint64(1)) * np.uint64(GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(MULTIPLIER_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(MULTIPLIER_2)
    x ^= x >> np.uint64(31)
    return x
