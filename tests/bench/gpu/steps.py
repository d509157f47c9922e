"""Whole steps of a model: those of a worker, two in flight, and by themselves the parts of what the device does.

    gather ─▶ forward ─▶ head ─▶ choose ─▶ append          and a copy of the tokens to pinned memory

The rows' ids and blocks lie on the device, as in a worker; the host knows the lengths alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.attention.rows import Placed
from kernels.largest.triton import pairs
from kernels.ops import Limits
from kernels.selection import sampling
from kernels.selection.draws import Draws
from kernels.states import triton as states
from kernels.states.reference import Chosen, Gathered, Tables
from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.device_steps import DeviceSteps
from services.worker.models.decoder import Decoder
from services.worker.multimodal import Multimodal
from services.worker.pooling import Pooler
from services.worker.step import (
    ROW_OK,
    SAMPLES,
    CacheShape,
    NewRow,
    Pending,
    SamplingParams,
    StepInput,
    StepOutput,
)
from tests.bench.gpu.clock import Ceilings, Clock
from tests.bench.gpu.rooms import PAGE

CHUNK = 512
"""Tokens of a prompt beside decodes."""
CUT = {"temperature": 0.7, "top_p": 0.95, "top_k": 50}


@dataclass(slots=True)
class Figures:
    """What steps of one batch size gave; times in seconds."""

    model: str
    how: str  # eager, graphs, pieces, and the type of the weights
    what: str  # greedy, cut, or beside a prompt
    rows: int
    context: int
    step_s: float
    weights_floor_s: float  # to read every weight once
    floor_s: float  # and the rows' keys and values; or to multiply, if that takes longer
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        return self.rows / self.step_s


class Loop:
    """Rows of one model that decode on and on."""

    def __init__(self, model: Decoder, cache: KVCache, rows: int, context: int) -> None:
        """Every row stands at `context` ids, and stays there: a step writes its last place again."""
        device, config = model.device, model.config
        blocks = -(-context // PAGE)
        self.rows, self.context = rows, context
        self._model, self._cache = model, cache
        order = torch.randperm(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        ids = torch.randint(0, config.vocab_size, (rows, context + 1), dtype=torch.int32, device=device)
        self._tables = Tables(ids, order, PAGE)
        spans = [(row, context - 1, 1, row, 0, 0) for row in range(rows)]
        self._spans = torch.tensor(spans, dtype=torch.int32, device=device)
        samples = [(row, context - 1, 0, row) for row in range(rows)]
        self._samples = torch.tensor(samples, dtype=torch.int32, device=device)
        self._counted = torch.zeros(rows, dtype=torch.int32, device=device)
        whole = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)]
        starts, contexts = torch.arange(rows + 1, dtype=torch.int32, device=device), torch.zeros_like(self._counted)
        self._gathered = Gathered(*whole, starts, contexts, torch.zeros_like(order))
        self._placed = Placed(starts, contexts)
        out = torch.zeros(rows, dtype=torch.int32)
        self._out = out.pin_memory() if device.type == "cuda" else out
        wholes = torch.tensor([(1, 77 * row, config.vocab_size) for row in range(rows)], dtype=torch.int64)
        parts = torch.tensor([(1.0, 1.0, -torch.inf)] * rows, dtype=torch.float64)
        self._draws = Draws(wholes.to(device), parts.to(device))
        self.gather()

    def gather(self) -> None:
        """The flat batch."""
        states.gather(self._spans, self._tables, self._gathered, self.context)

    def forward(self) -> torch.Tensor:
        """Hidden states."""
        ids, positions, slots, _, _, table = self._gathered
        starts, contexts = tuple(range(self.rows + 1)), (self.context,) * self.rows
        batch = Batch(ids, positions, slots, starts, contexts, table, None, placed=self._placed)
        return self._model.forward(batch, self._cache)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self._model.logits(hidden)

    def choose(self, x: torch.Tensor, draws: Draws | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and the pairs of the largest."""
        best = pairs(x)
        return sampling.sample(x, best, draws, cuts=False), best

    def append(self, tokens: torch.Tensor, best: torch.Tensor) -> None:
        """Takes them in, and to the host."""
        states.append(self._samples, Chosen(tokens, best, best), self._tables.tokens_RL, self._counted, 0)
        self._out.copy_(tokens, non_blocking=True)

    def parts(self, clock: Clock) -> dict[str, float]:
        """Seconds of each part, by itself; recorded as graphs, so without the host's time."""
        hidden = self.forward().clone()
        x = self.head(hidden).clone()
        tokens, best = self.choose(x)
        found: dict[str, Callable[[int], object]] = {
            "gather": lambda _: self.gather(),
            "forward": lambda _: self.forward(),
            "head": lambda _: self.head(hidden),
            "choose, greedy": lambda _: self.choose(x),
            "choose, drawn": lambda _: self.choose(x, self._draws),
            "append": lambda _: self.append(tokens, best),
        }
        return {name: clock.seconds(run)[0] for name, run in found.items()}


class Served:
    """Rows of one model as a worker runs them, each at a context of its own keys and values, which are random."""

    def __init__(self, model: Decoder, cache: KVCache, shape: CacheShape) -> None:
        self._steps = DeviceSteps(model, cache, shape, (Pooler(), Multimodal(None, None)), 256)
        self._vocabulary = model.config.vocab_size
        self._number = 0

    def begin(self, rows: int, context: int, last: int, **sampling: Any) -> None:
        """Puts requests on the first rows, whose last known id alone is computed; blocks reach to `last` ids."""
        self._steps.clear()
        held = -(-last // PAGE)
        new = [self._request(row, context, **sampling) for row in range(rows)]
        spans = [(row, context - 1, 1, SAMPLES) for row in range(rows)]
        self._wait(self._launch(spans, new, [range(row * held, (row + 1) * held) for row in range(rows)]))

    def decode(self, rows: int, context: int, count: int) -> None:
        """So many steps, two in flight; raises where a row gives no token."""
        before = None
        for index in range(count):
            launched = self._launch([(row, context + index, 1, SAMPLES) for row in range(rows)])
            if before is not None:
                self._wait(before)
            before = launched
        if before is not None:
            self._wait(before)

    def beside(self, rows: int, context: int, chunk: int, first_block: int) -> None:
        """One step of all rows and the first tokens of a prompt, on a row and blocks of its own."""
        blocks = range(first_block, first_block + -(-chunk // PAGE))
        spans = [*((row, context, 1, SAMPLES) for row in range(rows)), (rows, 0, chunk, SAMPLES)]
        listed = [*([range(0)] * rows), blocks]
        self._wait(self._launch(spans, [self._request(rows, chunk, temperature=0.0)], listed))

    def _request(self, row: int, length: int, **sampling: Any) -> NewRow:
        ids = np.random.default_rng(row).integers(0, self._vocabulary, length).astype(np.int32)
        return NewRow(row, 1, ids, length, SamplingParams(seed=row, **sampling), f"bench-{row}", None)

    def _launch(
        self, spans: list[tuple[int, int, int, int]], new: Sequence[NewRow] = (), blocks: Sequence[range] = ()
    ) -> StepOutput | Pending:
        self._number += 1
        columns = np.array(spans, np.int32).T
        held = [len(each) for each in blocks] or [0] * len(spans)
        step = StepInput(
            step_id=self._number,
            received_s=time.monotonic(),
            resync=False,
            freed_rows=np.empty(0, np.int32),
            new_rows=tuple(new),
            rows=columns[0],
            num_tokens=columns[2],
            num_computed=columns[1],
            flags=columns[3].astype(np.uint8),
            first_writable=np.zeros(len(spans), np.int32),
            block_counts=np.array(held, np.int32),
            block_ids=np.array([block for each in blocks for block in each], np.int32),
            draft_counts=np.empty(0, np.int32),
            draft_ids=np.empty(0, np.int32),
        )
        return self._steps.execute(step, dict)

    def _wait(self, launched: StepOutput | Pending) -> None:
        output = launched if isinstance(launched, StepOutput) else launched.wait()
        failed = [result for result in output.results if result.status != ROW_OK]
        if failed:
            raise RuntimeError(f"{len(failed)} rows failed, the first with status {failed[0].status}")


def shape_for(model: Decoder, rows: int, tokens: int) -> CacheShape:
    """A cache for so many rows of so many tokens, and a prompt beside them."""
    batched = max(rows, 2) + (CHUNK if model.device.type == "cuda" else 8)
    return CacheShape((rows + 1) * -(-tokens // PAGE), PAGE, rows + 1, model.config.max_model_len, batched)


def cache_for(model: Decoder, shape: CacheShape) -> KVCache:
    """With random keys and values."""
    cache = KVCache(model.kv_layout, shape, model.device)
    for layer in cache.tensor.view(len(cache.tensor), -1):
        layer.copy_(torch.randn(layer.shape, device=layer.device, dtype=model.dtype))
    return cache


def fits(model: Decoder, rows: int, context: int) -> bool:
    """Whether keys and values of so many rows fit beside what is there, with room for a step."""
    if model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    return rows * context * model.kv_layout.bytes_per_token < 0.8 * free


def limits_of(cache: KVCache, shape: CacheShape, context: int) -> Limits:
    """What graphs are recorded for."""
    return Limits(cache.tensor, PAGE, shape.max_num_seqs, shape.max_num_batched_tokens, context)


def floors(model: Decoder, ceilings: Ceilings, rows: int, context: int, beside: int = 0) -> tuple[float, float]:
    """Seconds: to read every weight; and keys and values too, or to multiply, if that takes longer."""
    config, layout = model.config, model.kv_layout
    keys = rows * context * layout.bytes_per_token
    products = (model.weight_bytes // model.dtype.itemsize) * 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    operations = (rows + beside) * products + (rows * context + beside**2 // 2) * attention
    weights = model.weight_bytes / ceilings.bandwidth
    return weights, ceilings.floor_s(model.weight_bytes + keys, operations)


def measure(model: Decoder, served: Served, clock: Clock, sizes: tuple[int, int, int], **sampling: Any) -> float:
    """Seconds of a decode step: so many rows at a context, so many steps."""
    rows, context, count = sizes
    last = context + count + 1
    begin = partial(served.begin, rows, context, last, **(sampling or {"temperature": 0.0}))
    if clock.on_gpu:  # compiles
        begin()
        served.decode(rows, context, 2)
    found = []
    for _ in range(3 if clock.on_gpu else 1):
        begin()
        found.append(clock.wall(lambda: served.decode(rows, context, count)) / count)
    return min(found)


def measure_beside(served: Served, clock: Clock, rows: int, context: int, chunk: int, first_block: int) -> float:
    """Seconds of a step with so many tokens of a prompt beside its rows; it waits for each."""
    found = []
    for _ in range(4 if clock.on_gpu else 1):
        served.begin(rows, context, context + 2, temperature=0.0)
        found.append(clock.wall(lambda: served.beside(rows, context, chunk, first_block)))
    return min(found)
