"""Rows with random wishes, and the features of the host as the oracle of those on the device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernels.logits.record import Logits
from services.worker.sampling.bias import LogitBias
from services.worker.sampling.device import DeviceFeatures, DevicePosition
from services.worker.sampling.feature import Feature, Position
from services.worker.sampling.masks import AllowedIds, BannedSequences, MinTokens, forbid
from services.worker.sampling.penalties import Penalties
from services.worker.step import NewRow
from tests.worker.columns import packed, request

CPU = torch.device("cpu")


class HostFeatures:
    """Edits in the sampler's order."""

    def __init__(self, vocab: int) -> None:
        self.features: tuple[Feature[Any], ...] = (
            AllowedIds(CPU),
            BannedSequences(CPU),
            MinTokens(CPU),
            LogitBias(CPU),
            Penalties(CPU, vocab),
        )

    def add(self, new: NewRow) -> None:
        for feature in self.features:
            feature.free(new.row)
            feature.add(new)

    def apply(self, x_PV: torch.Tensor, positions: Sequence[DevicePosition], tokens_RL: torch.Tensor) -> None:
        on_host = [
            Position(row, tokens_RL[row, :length].numpy(), drafts, mask) for row, length, drafts, mask in positions
        ]
        forbid(x_PV, on_host)
        for feature in self.features:
            feature.apply(x_PV, on_host)


def random_wishes(rng: random.Random, vocab: int, tokens: Sequence[int], share: float = 0.3) -> dict[str, Any]:
    """Sampling parameters; banned sequences are often about to be completed."""
    some = lambda: tuple(rng.sample(range(vocab), rng.randint(1, min(6, vocab))))  # noqa: E731
    behind = lambda: (*tokens[len(tokens) - rng.randint(0, 3) :], rng.randrange(vocab))  # noqa: E731
    choices: dict[str, Any] = {
        "repetition_penalty": lambda: rng.choice([0.7, 1.3]),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "logit_bias": lambda: tuple((token, rng.uniform(-100, 100)) for token in (*some(), *some())),
        "allowed_ids": lambda: rng.choice([some(), tuple(range(0, vocab, 2))]),
        "banned_sequences": lambda: (*(behind() for _ in range(3)), some(), some()[:1]),
    }
    wishes = {name: choose() for name, choose in choices.items() if rng.random() < share}
    if rng.random() < 0.6:
        wishes |= {"min_tokens": rng.randint(1, 8), "eos_ids": some(), "stop_ids": some()}
    return wishes


def random_masks(rng: random.Random, vocab: int, ends: Sequence[int], positions: int) -> list[np.ndarray]:
    """Grammar masks: many ids, few, or nothing but an end."""
    kinds = (range(0, vocab, 3), rng.sample(range(vocab), min(3, vocab)), ends[:1] or [0], ends or [0])
    return list(packed(*(rng.choice(kinds) for _ in range(positions)), vocab_size=vocab))


class Rows:
    """Rows whose ids grow step by step, edited by both implementations."""

    def __init__(self, seed: int, vocab: int, max_len: int, kernels: Logits, rows: int = 6) -> None:
        self.rng, self.vocab = random.Random(seed), vocab
        self.numbers = torch.Generator().manual_seed(seed)
        self.host, self.device = HostFeatures(vocab), DeviceFeatures(vocab, CPU, kernels)
        self.tokens_RL = torch.full((rows, max_len), -1, dtype=torch.int32)
        self.lengths = [0] * rows
        self.wishes: list[dict[str, Any]] = [{} for _ in range(rows)]

    def put(self, row: int, prompt_len: int, output: int = 0, **wishes: Any) -> None:
        """A request on a row."""
        self.tokens_RL[row] = -1
        self.lengths[row] = 0
        self.grow(row, prompt_len + output)
        ids = self.tokens_RL[row, : prompt_len + output].tolist()
        self.wishes[row] = wishes or random_wishes(self.rng, self.vocab, ids)
        new = request(row, ids, prompt_len, **self.wishes[row])
        self.host.add(new)
        self.device.add(new)

    def compare(self, positions: Sequence[DevicePosition]) -> torch.Tensor:
        """Edits the same logits in both ways; they must be equal to the last bit."""
        around = torch.full((len(positions), self.vocab + 5), torch.nan)
        x_PV = around[:, : self.vocab]
        x_PV.normal_(std=4, generator=self.numbers)
        x_PV[:, :: self.rng.randint(2, 9)] = -torch.inf
        expected = x_PV.clone()
        self.host.apply(expected, positions, self.tokens_RL)
        self.device.apply(x_PV, positions, self.tokens_RL)
        assert torch.equal(x_PV, expected), positions
        assert around[:, self.vocab :].isnan().all()
        return x_PV

    def grow(self, row: int, count: int) -> None:
        """Ids in the place of drafts; few of the vocabulary, so that many come twice."""
        length = self.lengths[row]
        self.lengths[row] += self._lay(row, length, count)

    def positions(self, row: int, drafts: int = 0, masked: bool = False) -> list[DevicePosition]:
        """Lays drafts behind the row's ids; a position after each."""
        length = self.lengths[row]
        drafts = self._lay(row, length, drafts)
        ends = (*self.wishes[row].get("eos_ids", ()), *self.wishes[row].get("stop_ids", ()))
        masks = random_masks(self.rng, self.vocab, ends, drafts + 1) if masked else [None] * (drafts + 1)
        return [DevicePosition(row, length + ahead, ahead, masks[ahead]) for ahead in range(drafts + 1)]

    def step(self, rows: Sequence[int], drafts: int = 0, masks: float = 0.3) -> None:
        """One position of each row, and up to so many drafts. The rows have grown then."""
        positions = [
            position
            for row in rows
            for position in self.positions(row, self.rng.randint(0, drafts), self.rng.random() < masks)
        ]
        self.compare(positions)
        for row in rows:
            self.grow(row, self.rng.randint(1, drafts + 1))

    def _lay(self, row: int, begin: int, count: int) -> int:
        ids = [self.rng.randrange(min(self.vocab, 6)) for _ in range(count)]
        place = self.tokens_RL[row, begin : begin + count]
        place[:] = torch.tensor(ids[: len(place)], dtype=torch.int32)
        return len(place)


def check_sequences_longer_than_the_row(kernels: Logits) -> None:
    """The end of the row before it in the table is nothing that stands before its ids."""
    rows = Rows(1, 10, 4, kernels, rows=2)
    rows.put(1, 2, banned_sequences=((7, 3, 4, 5), (3, 4, 6), (4, 4, 8)))
    rows.tokens_RL[:] = torch.tensor([[0, 0, 7, 7], [3, 4, 7, 3]])
    x_V = rows.compare([DevicePosition(1, 2)])[0]
    assert x_V[6] == -torch.inf
    assert x_V[[5, 7]].isfinite().all()
