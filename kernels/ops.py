"""The table of ops that a model's mathematics is written over.

V stands for an array: a tensor, or the symbol of one while a program is recorded (kernels/native). A model calls
nothing but these, so that one statement of its mathematics serves both.

T tokens   D hidden size   N heads   A head size   E = A / 2   F feed-forward size   O outputs   I inputs
M tokens that read media   P parts of what one of them reads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from kernels.attention.rows import Rows
from kernels.linear.blocks import Blocks
from kernels.on_device import OnDevice

V = TypeVar("V")
Tensor = torch.Tensor

Linear = Callable[[V], V]
"""A prepared weight: x_TI -> y_TO."""


@dataclass(slots=True, frozen=True)
class MediaTensors:
    """What the tokens of a step read of media."""

    positions_3T: Tensor  # int64, of all tokens: time, height, width; a text token has the same on all
    places_M: Tensor  # int64, rising: the tokens that read a row
    rows_MPD: Tensor  # what they read


@dataclass(slots=True, frozen=True)
class StepTensors:
    """What one forward pass reads besides the weights, as tensors on the device."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64; -1 where keys and values are not written
    rows: Rows
    cache: Tensor  # [layers, 2, blocks, *kv_block]: keys and values of every layer; native ops order each otherwise
    media: MediaTensors | None = None  # None where no token reads any


@dataclass(slots=True, frozen=True)
class Attention:
    """How one layer attends."""

    layer: int
    heads: int  # of queries; those of keys stand behind them
    window: int | None
    scale: float


@dataclass(slots=True, frozen=True)
class Step(Generic[V]):
    """The same, as the mathematics sees it."""

    ids_T: V
    positions_T: V
    positions_3T: V
    media: Any
    attend: Callable[[Attention, V, V, V, V], V]
    """(how, qk_TNA, v_TKA, cos_TE, sin_TE) -> x_TD, D = heads * A.

    Turns queries and keys by their angles, writes the new keys and values, then attends.
    """


@dataclass(slots=True, frozen=True)
class Limits:
    """What steps are at most, and the cache that they read and write."""

    cache: Tensor  # as in StepTensors
    block_size: int
    rows: int
    tokens: int
    context: int  # tokens of one row
    sample: bool = False  # only so much is made as tells what all takes, and it is let go again


class Warmed(NamedTuple):
    """What was made before serving, and its memory on the device; all of it, even where a sample was made."""

    graphs: int = 0
    bytes: int = 0


class Pass(Protocol):
    """A forward pass, ready to run."""

    listing: str
    """Its program, to read; empty where there is none."""

    def warm(self, limits: Limits | None) -> Warmed:
        """Makes what serving within these limits should not wait for, once the cache is there.

        None lets go of it and of the cache. Both are to be called in inference mode, where steps are.
        """

    def __call__(self, given: StepTensors) -> Tensor:
        """What the mathematics gives for the tokens of a step, good until the next call."""


class Cut(NamedTuple):
    """How a token is drawn from one row of logits."""

    row: int
    best: float  # the row's largest logit, which is finite
    key: int  # of the noise: 64 bits, signed
    temperature: float
    top_k: int  # below the vocabulary size; 0 keeps all
    top_p: float
    min_p: float

    @property
    def cuts(self) -> bool:
        """Whether any candidate may be dropped."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Selection(Protocol):
    """What is chosen from float32 logits x_NV. services/worker/sampling has it in torch, which is the specification."""

    def largest(self, x_NV: Tensor) -> tuple[list[int], list[float]]:
        """The place of each row's largest, the first of equals, and its value; a NaN counts as the largest."""

    def top(self, x_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Values and ids of the `count` first of each row: larger ones first, lower ids first among equals."""

    def draw(self, x_NV: Tensor, cuts: Sequence[Cut]) -> list[int]:
        """One token for each cut."""

    def weigh(self, x_NV: Tensor, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Each row's log of the sum of exponentials, and 1 + how many logits are larger than its token's."""


@dataclass(slots=True, frozen=True)
class Ops(Generic[V]):
    """One implementation of every op; kernels/<op>/reference.py says what each does."""

    name: str  # native, torch or reference
    level: str  # the instruction set, where there is a choice
    note: str  # why it is not the one that could have been wanted; empty: it is
    kv_dtype: torch.dtype | None  # of the cache; None: the model's own
    kv_block: Callable[[int, int, int], tuple[int, ...]]  # tokens of a block, heads, A -> shape of its keys
    # once, when weights are loaded
    prepare_linear: Callable[[Tensor | Blocks, Tensor | None], Linear[V]]  # weight_OI, bias_O
    prepare_product: Callable[[Tensor | Blocks, Tensor | None], Linear[Tensor]]  # of floats; for tensors, at any time
    prepare_embedding: Callable[[Tensor | Blocks, Linear[V] | None], Any]  # table_VD, and the head if it is the same
    compile: Callable[[Callable[[Step[V]], V]], Pass]  # of the tokens of a step
    compile_rows: Callable[[Callable[[V], V], int], Callable[[Tensor], Tensor]]  # of x_XI, whose width is I
    # the mathematics
    embedding: Callable[[V, Any], V]  # ids_T, prepared table
    rms_norm: Callable[[V, Tensor, float], V]  # x_TD, weight_D, eps
    add_rms_norm: Callable[[V, V, Tensor, float], tuple[V, V]]  # x, residual, weight_D, eps -> normed, total
    split_heads: Callable[[V, Sequence[int], int], tuple[V, ...]]  # x_TX or x_TNA, counts of heads, A -> x_TNA each
    qk_norm: Callable[[V, Tensor, Tensor, int, float], V]  # qk_TNA, q_norm_A, k_norm_A, query heads, eps
    rope_cos_sin: Callable[[V, Tensor, float, torch.dtype], tuple[V, V]]  # positions_T, inv_freq_E, scale
    rope_axes_cos_sin: Callable[[V, Tensor, float, torch.dtype], tuple[V, V]]  # positions_3T, inv_freq_3E, scale
    replace_rows: Callable[[V, Any, int], V]  # x_TD, media of the step, part
    add_rows: Callable[[V, Any, int], V]  # the same
    silu_mul: Callable[[V], V]  # gate_up_T2F
    largest: Callable[[V], V]  # x_TV -> [T, 2]: where each row's largest is, as the bits of an int32, and its value
    # of tensors alone: what is chosen from logits; None leaves it to torch
    selection: Selection | None
    # seconds spent in compiled kernels so far; 0 where nobody counts
    spent_s: Callable[[], float]
    # what a step takes besides the pass where nobody waits for the device in it; None: steps are waited for
    on_device: OnDevice | None = None
