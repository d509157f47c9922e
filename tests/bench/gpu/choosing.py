"""Kernels that edit logits, choose tokens, keep the table of requests and fill a graph's inputs.

P positions   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.graphs import reference as fill_reference
from kernels.graphs.triton import fill
from kernels.largest import reference as largest_reference
from kernels.largest.triton import pairs
from kernels.logits import reference as logits_reference
from kernels.logits import triton as logits
from kernels.logits.record import mask_words
from kernels.ops import Cut
from kernels.selection import ranks, sampling
from kernels.selection.draws import Draws
from kernels.states import reference as states_reference
from kernels.states import triton as states
from services.worker.sampling.device import DeviceFeatures, DevicePosition
from services.worker.sampling.draw import Drawing
from services.worker.step import NewRow, SamplingParams
from tests.bench.gpu.case import Case, Given
from tests.bench.gpu.rooms import PAGE, Work


def cases(work: Work) -> Iterator[Case]:
    """All of them."""
    yield from drawing(work)
    yield from editing(work)
    yield from tables(work)


def drawing(work: Work) -> Iterator[Case]:
    """Tokens of all rows: greedy, drawn, drawn with cutoffs, and each kind beside the others."""
    count, vocabulary = work.choose
    spec = Drawing(vocabulary, work.device)
    read, size = 4 * count * vocabulary, f"{count} x {vocabulary}"

    def x() -> torch.Tensor:
        return torch.randn(count, vocabulary, device=work.device) * 3

    yield Case(f"largest, {size}", lambda: (x(),), _bits(pairs), _bits(largest_reference.pairs), read, tolerance=None)
    for name, kinds in (("drawn", (1,)), ("cut", (2,)), ("greedy, drawn and cut", (0, 1, 2))):
        cuts = 2 in kinds
        yield Case(
            f"sample, {name}, {size}",
            lambda kinds=kinds: (x(), *_wishes(work, kinds)),  # type: ignore[misc]
            lambda x, draws, wishes, cuts=cuts: sampling.sample(x, pairs(x), draws, cuts),  # type: ignore[misc]
            lambda x, draws, wishes: _drawn(spec, x, wishes),
            read,
            tolerance=None,
        )
    yield Case(
        f"weigh, {size}",
        lambda: (x(), work.whole(vocabulary, count, dtype=torch.int32)),
        ranks.weigh,
        lambda x, tokens: (
            torch.logsumexp(x, -1),
            ((x > x.gather(1, tokens.long()[:, None])).sum(1) + 1).int(),
        ),
        read,
        tolerance=1e-5,
    )
    yield Case(f"top 20, {size}", lambda: (x(), 20), ranks.top, spec.top, read, tolerance=None)


def _bits(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: run(x).view(torch.int32)


Wish = tuple[int, int, float, int, float, float]
"""Whether it is drawn (0: greedy), key of the noise, temperature, top_k, top_p, min_p."""


def _wishes(work: Work, kinds: tuple[int, ...]) -> tuple[Draws, tuple[Wish, ...]]:
    """How each row draws: greedy (0), without cutoffs (1), with some (2)."""
    count, vocabulary = work.choose
    numbers = np.random.default_rng(int(torch.randint(0, 2**31, ())))
    wishes: list[Wish] = []
    for row in range(count):
        kind = kinds[row % len(kinds)]
        noise, temperature = int(numbers.integers(-(2**63), 2**63 - 1)), float(numbers.choice([0.7, 1.0]))
        if kind < 2:
            wishes.append((kind, noise, temperature, vocabulary, 1.0, 0.0))
        else:
            top_k, top_p, min_p = [(50, 0.95, 0.0), (vocabulary, 0.9, 0.0), (vocabulary, 0.99, 0.05)][row % 3]
            wishes.append((1, noise, temperature, min(top_k, vocabulary), top_p, min_p))
    wholes = torch.tensor([(wish[0], wish[1], wish[3]) for wish in wishes], dtype=torch.int64)
    logs = [(wish[2], wish[4], math.log(wish[5]) if wish[5] else -math.inf) for wish in wishes]
    parts = torch.tensor(logs, dtype=torch.float64)
    return Draws(wholes.to(work.device), parts.to(work.device)), tuple(wishes)


def _drawn(spec: Drawing, x: torch.Tensor, wishes: tuple[Wish, ...]) -> torch.Tensor:
    best, values = spec.largest(x)
    vocabulary, tokens = x.shape[1], torch.tensor(best)
    cuts = [
        Cut(row, values[row], wish[1], wish[2], wish[3] if wish[3] < vocabulary else 0, wish[4], wish[5])
        for row, wish in enumerate(wishes)
        if wish[0]
    ]
    for cut, token in zip(cuts, spec.draw(x, cuts), strict=True):
        tokens[cut.row] = token
    return tokens.to(x.device, torch.int32)


def editing(work: Work) -> Iterator[Case]:
    """All edits of logits: every fourth row of each kind, against the specification of the same kernels."""
    count, vocabulary = work.choose
    length = 64
    words = np.random.default_rng(5)
    tokens = work.whole(vocabulary, count, length, dtype=torch.int32)
    few = tuple(range(0, vocabulary, 3))
    wishes = (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"logit_bias": ((3, 5.0), (7, -2.0)), "banned_sequences": ((5,), (1, 2))},
        {"allowed_ids": few[: max(1, len(few) // 2)], "min_tokens": 4, "eos_ids": (2,)},
        {"min_tokens": length, "eos_ids": (2, 9)},  # beside a mask
    )
    mask = words.integers(0, 255, 4 * mask_words(vocabulary), dtype=np.uint8)

    def made(kernels: Any) -> DeviceFeatures:
        features = DeviceFeatures(vocabulary, work.device, kernels)
        for row in range(count):
            params = SamplingParams(seed=row, **wishes[row % 4])  # type: ignore[arg-type]
            features.add(NewRow(row, 1, np.zeros(8, np.int32), 8, params, "bench", None))
        return features

    ours, plain = made(logits), made(logits_reference)
    positions = [DevicePosition(row, length, 0, mask if row % 4 == 3 else None) for row in range(count)]

    def run(features: DeviceFeatures, x: torch.Tensor) -> torch.Tensor:
        features.apply(x, positions, tokens)
        return x

    yield Case(
        f"logits, all edits, {count} x {vocabulary}",
        lambda: (torch.randn(count, vocabulary, device=work.device),),
        partial(run, ours),
        partial(run, plain),
        # Penalties and allowed ids look at every count or bit; masks write half of the logits.
        count // 4 * vocabulary * (4 + 4 + 4),
        tolerance=1e-6,
        recorded=False,
    )


def tables(work: Work) -> Iterator[Case]:
    """The table of requests, and a graph's inputs."""
    count, context = work.decode
    length = -(-(context + 8) // PAGE) * PAGE
    device = work.device

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def held() -> states_reference.Tables:
        ids = work.whole(1000, count, length, dtype=torch.int32)
        blocks = work.whole(1000, count, length // PAGE, dtype=torch.int32)
        return states_reference.Tables(ids, blocks, PAGE)

    def stage_given() -> Given:
        writes = [(states_reference.TOKENS, row, 0, length // 2, row * (length // 2)) for row in range(count)]
        return ints(writes), work.whole(1000, count * (length // 2), dtype=torch.int32), held(), length // 2

    yield Case(
        f"states, stage {count}",
        stage_given,
        _into(states.stage, 2),
        _into(states_reference.stage, 2),
        count * length // 2 * 8,
        tolerance=None,
    )

    def gather_given() -> Given:
        spans = [(row, context - 1, 1, row, 0, 0) for row in range(count)]
        whole = [torch.full((count,), -7, dtype=torch.int64, device=device) for _ in range(3)]
        sizes = ((count + 1,), (count,), (count, length // PAGE))
        rest = [torch.full(size, -7, dtype=torch.int32, device=device) for size in sizes]
        return ints(spans), held(), states_reference.Gathered(*whole, *rest), length

    yield Case(
        f"states, gather {count} x {context}",
        gather_given,
        _into(states.gather, 2),
        _into(states_reference.gather, 2),
        count * (context // PAGE * 8 + 64),
        tolerance=None,
    )

    def append_given() -> Given:
        drafts = 3
        spans = [(row, context - 4, drafts, row * (drafts + 1)) for row in range(count)]
        positions = count * (drafts + 1)
        raw = torch.randn(positions, 2, device=device)
        raw[::7, 1] = float("nan")
        chosen = states_reference.Chosen(work.whole(3, positions, dtype=torch.int32), raw, raw.clone())
        ids = work.whole(3, count, length, dtype=torch.int32)
        return ints(spans), chosen, ids, ints([-7] * count), drafts

    yield Case(
        f"states, append {count}",
        append_given,
        _into(states.append, 2, 3),
        _into(states_reference.append, 2, 3),
        count * 4 * 40,
        tolerance=None,
    )

    def fill_given() -> Given:
        columns = []
        for tokens in (count, count + 8):
            whole = [work.whole(1000, tokens) for _ in range(3)]
            rest = [ints(list(range(tokens + 1))), ints([context] * tokens)]
            columns.append(fill_reference.Columns(*whole, *rest, work.whole(9, tokens, length // PAGE).int()))
        return (*columns, 1, PAGE)

    yield Case(
        f"graphs, fill {count}",
        fill_given,
        _into(fill, 1),
        _into(fill_reference.fill, 1),
        count * (length // PAGE) * 8,
        tolerance=None,
    )


def _into(write: Callable[..., None], *written: int) -> Callable[..., list[Any]]:
    """What it writes, by place among what it is given."""

    def run(*given: Any) -> list[Any]:
        write(*given)
        return [given[place] for place in written]

    return run
