"""Samples one token for each position of a step, in the order that the package's docstring gives.

    raw logits ── argmax ── finite? ── masks and features edit a copy ── argmax ── else: draw
                             └── without any: greedy, or draw

A position that is greedy and has no mask and no feature costs its share of one argmax over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kernels.ops import Cut, Selection
from services.worker.sampling.bias import LogitBias
from services.worker.sampling.counter import key, signed
from services.worker.sampling.draw import Drawing
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

    def __init__(self, vocab_size: int, device: torch.device, selection: Selection | None = None) -> None:
        """`selection` is that of the ops, if they have one."""
        self._vocab_size = vocab_size
        self._params: dict[int, SamplingParams] = {}
        self._greedy: set[int] = set()  # rows whose token is the likeliest
        self._edited: set[int] = set()  # rows whose logits features edit
        self._plain: set[int] = set()  # rows that are greedy, not edited, and want no log probabilities
        self._logprobs: dict[int, int] = {}  # how many of the likeliest a row wants besides its token
        self._selection: Selection = selection or Drawing(vocab_size, device)
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
        if new.sampling.temperature <= GREEDY_UP_TO:
            self._greedy.add(new.row)
        if any(feature.edits(new.row) for feature in self._features):
            self._edited.add(new.row)
        if new.sampling.logprobs is not None:
            self._logprobs[new.row] = new.sampling.logprobs
        elif new.row in self._greedy and new.row not in self._edited:
            self._plain.add(new.row)

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._params.pop(row, None)
        self._greedy.discard(row)
        self._edited.discard(row)
        self._plain.discard(row)
        self._logprobs.pop(row, None)
        for feature in self._features:
            feature.free(row)

    def params(self, row: int) -> SamplingParams:
        """How the tokens of the row are chosen."""
        return self._params[row]

    def take_likeliest(self, rows: Iterable[int]) -> bool:
        """Whether the rows need no logits but the largest, as long as they have no masks."""
        return self._plain.issuperset(rows)

    def likeliest(self, best: Sequence[int], best_values: Sequence[float]) -> list[Sampled]:
        """One result per position, where nothing but the largest logit counts."""
        return [
            Sampled(ROW_OK, token) if math.isfinite(value) else _NOT_FINITE
            for token, value in zip(best, best_values, strict=True)
        ]

    def sample(self, logits_NV: torch.Tensor, positions: Sequence[Position]) -> list[Sampled]:
        """One result per position."""
        best, best_values = self._selection.largest(logits_NV)
        sampled = self.likeliest(best, best_values)
        edited: list[int] = []
        cuts: list[Cut] = []
        for index, position in enumerate(positions):
            if sampled[index] is _NOT_FINITE:
                continue
            if position.mask is not None or position.row in self._edited:
                edited.append(index)
            elif position.row not in self._greedy:
                cuts.append(self._cut(position, index, best_values[index]))
        if cuts:
            for cut, token in zip(cuts, self._selection.draw(logits_NV, cuts), strict=True):
                sampled[cut.row] = Sampled(ROW_OK, token)
        if edited:
            picked = self._pick(logits_NV[edited], [positions[index] for index in edited])
            for index, chosen in zip(edited, picked, strict=True):
                sampled[index] = Sampled(ROW_NO_TOKEN, None) if chosen is None else Sampled(ROW_OK, chosen)
        if self._logprobs:
            self._add_logprobs(sampled, logits_NV, positions)
        return sampled

    def candidates(
        self, logits_NV: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]
    ) -> list[tuple[Candidate, ...]]:
        """Log probabilities of each row's token and of as many of its likeliest."""
        return candidates(logits_NV, tokens, tops, self._selection)

    def _pick(self, logits_NV: torch.Tensor, positions: Sequence[Position]) -> list[int | None]:
        """Tokens of positions whose logits, which are edited here, are not raw; None where nothing may be sampled."""
        forbid(logits_NV, positions)
        for feature in self._features:
            feature.apply(logits_NV, positions)
        best, best_values = self._selection.largest(logits_NV)
        picked: list[int | None] = [
            token if value > -math.inf else None for token, value in zip(best, best_values, strict=True)
        ]
        cuts = [
            self._cut(position, index, best_values[index])
            for index, position in enumerate(positions)
            if picked[index] is not None and position.row not in self._greedy
        ]
        if cuts:
            for cut, token in zip(cuts, self._selection.draw(logits_NV, cuts), strict=True):
                picked[cut.row] = token
        return picked

    def _cut(self, position: Position, index: int, best: float) -> Cut:
        params = self._params[position.row]
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        noise = signed(key(params.seed, len(position.tokens)))
        return Cut(index, best, noise, params.temperature, top_k, params.top_p, params.min_p)

    def _add_logprobs(self, sampled: list[Sampled], logits_NV: torch.Tensor, positions: Sequence[Position]) -> None:
        asked = [
            (index, result.token, top)
            for index, result in enumerate(sampled)
            if result.token is not None and (top := self._logprobs.get(positions[index].row)) is not None
        ]
        if asked:
            indices = [index for index, _, _ in asked]
            raw_NV = logits_NV if len(indices) == len(positions) else logits_NV[indices]
            found = self.candidates(raw_NV, [token for _, token, _ in asked], [top for _, _, top in asked])
            for index, entries in zip(indices, found, strict=True):
                sampled[index] = sampled[index]._replace(logprobs=entries)
