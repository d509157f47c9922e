"""What every table of ops over tensors has in common: tensors need no compiling, and a layer's attention comes last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.attention.rows import Rows
from kernels.linear import packed, tiled
from kernels.linear import reference as linear_reference
from kernels.linear.blocks import Blocks
from kernels.ops import Attention, Limits, Linear, Step, StepTensors, Warmed

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""A prepared attention, called once per layer: (q_THD, k_cache_NPKD, v_cache_NPKD, scale) -> out_THD."""
Write = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], Tensor, Tensor], Tensor]
"""(qk_TNA, v_TKA, (cos_TE, sin_TE), cache_2NPKD, slots_T) -> q_THA: turns, and writes keys and values."""


class Eager:
    """Each step goes through the mathematics; its attention is prepared once per window."""

    listing = ""

    def __init__(
        self,
        write: Write,
        prepare_attention: Callable[[Rows, int | None], Attend],
        mathematics: Callable[[Step[Tensor]], Tensor],
    ) -> None:
        self._write = write
        self._prepare_attention = prepare_attention
        self._mathematics = mathematics

    def warm(self, limits: Limits | None) -> Warmed:
        """See kernels.ops.Pass: nothing."""
        del limits
        return Warmed()

    def __call__(self, given: StepTensors) -> Tensor:
        """See kernels.ops.Pass."""
        prepared: dict[int | None, Attend] = {}

        def attend(how: Attention, qk_TNA: Tensor, v_TKA: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
            cache = given.cache[how.layer]
            q_THA = self._write(qk_TNA, v_TKA, (cos_TE, sin_TE), cache, given.slots_T)
            if how.window not in prepared:
                prepared[how.window] = self._prepare_attention(given.rows, how.window)
            return prepared[how.window](q_THA, cache[0], cache[1], how.scale).flatten(1)

        media = given.media
        positions_3T = given.positions_T.expand(3, -1) if media is None else media.positions_3T
        return self._mathematics(Step(given.ids_T, given.positions_T, positions_3T, media, attend))


def turn_and_write(
    rope: Callable[[Tensor, Tensor, Tensor], Tensor],
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
) -> Write:
    """Both, one after the other."""

    def write(qk_TNA: Tensor, v_TKA: Tensor, angles: tuple[Tensor, Tensor], cache: Tensor, slots_T: Tensor) -> Tensor:
        heads = qk_TNA.shape[1] - v_TKA.shape[1]
        turned_TNA = rope(qk_TNA, *angles)
        kv_write(turned_TNA[:, heads:], v_TKA, cache[0], cache[1], slots_T)
        return turned_TNA[:, :heads]

    return write


def compile_rows(mathematics: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    """The mathematics itself."""
    del width
    return mathematics


def linear(fast: bool, deterministic: bool) -> Callable[[Tensor | Blocks, Tensor | None], Linear[Tensor]]:
    """How a weight is prepared; blocks are what they stand for."""

    def prepare(weight_OI: Tensor, bias_O: Tensor | None) -> Linear[Tensor]:
        kind = packed.Linear if fast and packed.is_available(weight_OI) else linear_reference.Linear
        return kind(weight_OI, bias_O)

    prepare_plain = partial(tiled.Linear, prepare) if deterministic else prepare
    return lambda weight_OI, bias_O: prepare_plain(_plain(weight_OI), bias_O)


def table(table_VD: Tensor | Blocks, head: Linear[Tensor] | None) -> Tensor:
    """An embedding table, ready to be read."""
    del head  # it keeps its weight in a layout of its own
    return _plain(table_VD)


def _plain(weight: Tensor | Blocks) -> Tensor:
    return weight.dequantize() if isinstance(weight, Blocks) else weight


def split_heads(x: Tensor, counts: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
    """Views of x_TX or x_TNA, as many heads in each as counted."""
    x_TNA = torch.unflatten(x, 1, (-1, head_dim)) if x.dim() == 2 else x
    return tuple(torch.split(x_TNA, list(counts), dim=1))


def tokens_first(block_size: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """The shape of a block's keys."""
    return block_size, heads, head_dim
