"""Whole decode steps of a model: what the device does between two tokens of every row.

    gather ─▶ forward ─▶ head ─▶ choose ─▶ append          and a copy of the tokens to pinned memory

The rows' ids and blocks lie on the device, as in a worker; the host knows the lengths alone. Each part is timed by
itself, then whole steps one behind the other, without waiting between them: by the host, and as graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.attention.rows import Placed, Rows
from kernels.largest.triton import pairs
from kernels.ops import Limits
from kernels.selection import sampling
from kernels.selection.draws import Draws
from kernels.states import triton as states
from kernels.states.reference import Chosen, Gathered, Tables
from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.models.decoder import Decoder
from services.worker.step import CacheShape
from tests.bench.gpu.clock import Ceilings, Clock
from tests.bench.gpu.rooms import PAGE


@dataclass(frozen=True, slots=True)
class PlacedBatch(Batch):
    """A batch whose numbers lie on the device."""

    placed: Placed | None = None

    def rows(self, block_size: int) -> Rows:
        """What attention reads of it."""
        return Rows(self.row_starts, self.context_lens, self.block_table_RB, block_size, self.placed)


@dataclass(slots=True)
class Figures:
    """What steps of one batch size gave; times in seconds."""

    model: str
    how: str  # eager, graphs, pieces
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
        batch = PlacedBatch(ids, positions, slots, starts, contexts, table, None, None, self._placed)
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

    def step(self) -> None:
        """A step of greedy rows."""
        self.gather()
        self.append(*self.choose(self.head(self.forward())))

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


def cache_for(model: Decoder, rows: int, context: int) -> KVCache:
    """Of so many rows at that context."""
    shape = CacheShape(rows * -(-context // PAGE), PAGE, rows, model.config.max_model_len, max(rows, 2))
    return KVCache(model.kv_layout, shape, model.device)


def fits(model: Decoder, rows: int, context: int) -> bool:
    """Whether keys and values of so many rows fit beside what is there, with room for a step."""
    if model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    return rows * context * model.kv_layout.bytes_per_token < 0.8 * free


def limits_of(model: Decoder, cache: KVCache, rows: int, context: int) -> Limits:
    """What graphs are recorded for."""
    return Limits(cache.tensor, PAGE, rows, rows, min(context, model.config.max_model_len))


def measure(name: str, how: str, loop: Loop, model: Decoder, clock: Clock, ceilings: Ceilings, count: int) -> Figures:
    """Steps one behind the other, without waiting between them; the parts too where nothing stands around them."""
    loop.step()  # compiles
    clock.wait()

    def many() -> None:
        for _ in range(count):
            loop.step()

    step_s = min(clock.wall(many) for _ in range(3 if clock.on_gpu else 1)) / count
    layout, config = model.kv_layout, model.config
    keys = loop.rows * loop.context * layout.bytes_per_token
    weights = model.weight_bytes
    operations = loop.rows * (
        weights // model.dtype.itemsize * 2 + 4 * loop.context * config.num_layers * config.num_heads * config.head_dim
    )
    return Figures(
        name,
        how,
        loop.rows,
        loop.context,
        step_s,
        weights / ceilings.bandwidth,
        ceilings.floor_s(weights + keys, operations),
        loop.parts(clock) if how == "eager" else {},
    )
