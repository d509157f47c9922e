"""Graphs as this GPU records them, held to the same pass without: of every kind, of batches that fill them and less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from kernels.attention.rows import Placed, Rows
from kernels.dispatch import choose_ops
from kernels.graphs.graphed import GraphOptions, with_graphs
from kernels.ops import Limits, StepTensors
from services.worker.cache import KVCache
from services.worker.models.decoder import Decoder
from services.worker.step import CacheShape
from tests.bench.gpu import models
from tests.bench.gpu.case import Case
from tests.bench.gpu.rooms import PAGE

_DRAFTS = 2
_BATCHES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("full, one row", (1,)),
    ("full, padded", (1, 1, 1)),
    ("full, drafts", (3, 1, 2)),
    ("pieces", (1, 5)),
    ("pieces, padded", (4, 1, 6)),
)
"""What is tried, and the new tokens of each row."""


class _Model:
    """A Qwen3 with its graphs, made for the first case: what fails then is that case's error."""

    def __init__(self, device: torch.device, *, toy: bool) -> None:
        self.rows, self.tokens, self.context = (4, 12, 32) if toy else (32, 96, 2048)
        self.config = models.config_of("qwen3-0.6b", toy=toy)
        self._device = device
        self._dtype = torch.float16 if toy else torch.bfloat16

    @cached_property
    def made(self) -> tuple[Decoder, KVCache]:
        """With a cache of random keys and values."""
        ops = choose_ops("triton", device=str(self._device))
        ops = with_graphs(ops, GraphOptions("both", _DRAFTS), self._device)
        model = models.Maker(self.config, ops, self._dtype, self._device).model()
        blocks = self.rows * self.context // PAGE
        shape = CacheShape(blocks, PAGE, self.rows, self.context, self.tokens)
        cache = KVCache(model.kv_layout, shape, self._device)
        cache.tensor.normal_()
        model.warm(Limits(cache.tensor, PAGE, self.rows, self.tokens, self.context))
        return model, cache

    def replayed(self, step: StepTensors) -> torch.Tensor:
        """Hidden states of a step."""
        return self.made[0]._forward(step).clone()

    def plain(self, step: StepTensors) -> torch.Tensor:
        """The same, of a cache that graphs were not recorded for, in the same memory: the pass runs without them."""
        return self.replayed(replace(step, cache=step.cache.view_as(step.cache)))


def cases(device: torch.device, *, toy: bool) -> Iterator[Case]:
    """Hidden states as a pass gives them: each batch twice, so that a replay follows another's leavings."""
    model = _Model(device, toy=toy)
    rows = model.rows
    batches = _BATCHES if toy else (*_BATCHES, ("full, all rows", (1,) * rows), ("pieces, long", (50, 1, 1, 30)))
    for name, counts in batches:
        for index in range(1 if toy else 2):
            yield Case(
                f"graphs, {name} {index + 1}",
                lambda counts=counts: (_step(counts, model),),  # type: ignore[misc]
                model.replayed,
                model.plain,
                timed=False,
            )


def _step(counts: Sequence[int], model: _Model) -> StepTensors:
    """Rows of these new tokens behind as many others as there is room for, in scattered blocks."""
    cache, longest = model.made[1], model.context
    device, blocks = cache.tensor.device, longest // PAGE
    table = torch.randperm(cache.num_blocks)[: len(counts) * blocks].view(len(counts), blocks)
    contexts = [int(torch.randint(count, longest + 1, ())) for count in counts]
    starts, positions, slots = [0], [], []
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        at = torch.arange(context - count, context)
        starts.append(starts[-1] + count)
        positions.append(at)
        slots.append(table[row, at // PAGE] * PAGE + at % PAGE)
    placed = Placed(*(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, contexts)))
    rows = Rows(tuple(starts), tuple(contexts), table.int().to(device), PAGE, placed)
    ids = torch.randint(0, model.config.vocab_size, (starts[-1],), device=device)
    return StepTensors(ids, torch.cat(positions).to(device), torch.cat(slots).to(device), rows, cache.tensor)
