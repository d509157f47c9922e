"""The ops over symbols: what each adds to the program, and the runs of a program that is done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.linear.blocks import Blocks
from kernels.native.build import Unavailable
from kernels.native.library import Arena, CompiledProgram, Inputs, Library, PackedWeight, Pool, StepOfC, kv_width, load
from kernels.native.program import Line, Listing, Op, Recorder, Symbol
from kernels.native.selection import Selection
from kernels.ops import Attention, Limits, Ops, Step, StepTensors, Warmed

_TURN_NS = 25
"""One turn of a waiting thread, about."""


@dataclass(slots=True, frozen=True)
class NativeOptions:
    """How the native kernels run. `isa` is one of kernels.native.build.CHOICES."""

    isa: str = "auto"
    threads: int = 1
    spin_us: float = 100.0
    pin: bool = False


def native_ops(
    options: NativeOptions, kv_dtype: torch.dtype | None, head_dim: int, *, deterministic: bool = False
) -> Ops[Symbol]:
    """The table; all that is prepared with it runs on one pool of threads. Raises Unavailable.

    Deterministic: a token is computed alike whether it is of a prompt or was generated, where that is not so by itself.
    """
    library = load(options.isa)
    if not library.serves(head_dim):
        raise Unavailable(f"native attention does not do heads of {head_dim}")
    kv_dtype = kv_dtype or library.cache_dtype
    if kv_dtype not in library.caches:
        raise Unavailable(f"native attention at level {library.level} has no cache of {str(kv_dtype).split('.')[-1]}")
    pool = Pool(library, options.threads, round(options.spin_us * 1000 / _TURN_NS))
    if options.pin:
        pool.pin()
    engine = _Engine(library, pool, kv_dtype, Arena(library), deterministic)
    return Ops(
        name="native",
        level=library.level,
        note="",
        kv_dtype=kv_dtype,
        kv_block=lambda block_size, heads, head_dim: (heads, block_size, kv_width(kv_dtype, head_dim)),
        prepare_linear=engine.linear,
        prepare_product=engine.product,
        prepare_embedding=engine.table,
        compile=engine.compile,
        compile_rows=engine.compile_rows,
        embedding=embedding,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        split_heads=split_heads,
        qk_norm=qk_norm,
        rope_cos_sin=rope_cos_sin,
        rope_axes_cos_sin=rope_axes_cos_sin,
        replace_rows=replace_rows,
        add_rows=add_rows,
        silu_mul=silu_mul,
        largest=largest,
        selection=Selection(library, pool),
        spent_s=pool.spent_s,
    )


class Linear:
    """A packed weight as an op."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Symbol) -> Symbol:
        """The product for every row of x, which is rounded first where the weight is quantized."""
        recorder, (outputs, inputs) = x.recorder, self.weight.shape
        if x.width != inputs:
            raise ValueError(f"a product of {inputs} inputs is given {x.width}")
        if not x.whole:
            raise ValueError("a product reads all of a value, not a part")
        if self.weight.inputs is not Inputs.FLOATS:
            x = recorder.rounded(x, self.weight.inputs)
        y = recorder.new(outputs)
        recorder.add(Line(Op.LINEAR, x=x, y=y, weight=self.weight))
        return y


class Product:
    """A packed weight for tensors: x_TI -> y_TO, in float32."""

    def __init__(self, library: Library, pool: Pool, weight: PackedWeight) -> None:
        self._multiply = library.calls.triptych_product
        self._pool = pool
        self._weight = weight

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product for every row of x."""
        outputs, inputs = self._weight.shape
        if x_TI.shape[1:] != (inputs,) or x_TI.dtype is not torch.float32:
            raise ValueError(f"a product of {inputs} float32 inputs is given {x_TI.dtype} {list(x_TI.shape)}")
        x_TI = x_TI.contiguous()
        y_TO = torch.empty(len(x_TI), outputs)
        self._multiply(self._pool.address, self._weight.address, x_TI.data_ptr(), len(x_TI), y_TO.data_ptr())
        return y_TO


def embedding(ids: Symbol, table: Linear) -> Symbol:
    """Rows of the table by the step's ids."""
    y = ids.recorder.new(table.weight.shape[1])
    ids.recorder.add(Line(Op.EMBEDDING, y=y, weight=table.weight))
    return y


def rms_norm(x: Symbol, weight_D: torch.Tensor, eps: float) -> Symbol:
    """Root mean square norm of a whole row."""
    y = x.recorder.new(x.width)
    x.recorder.add(Line(Op.RMS_NORM, x=x, y=y, number=eps, weight=_floats(weight_D)))
    return y


def add_rms_norm(x: Symbol, residual: Symbol, weight_D: torch.Tensor, eps: float) -> tuple[Symbol, Symbol]:
    """The norm of the sum, and the sum, which takes the residual's place."""
    y = x.recorder.new(x.width)
    x.recorder.add(Line(Op.ADD_RMS_NORM, x=x, y=y, z=residual, number=eps, weight=_floats(weight_D)))
    return y, x.recorder.changed(residual)


def split_heads(x: Symbol, counts: Sequence[int], head_dim: int) -> tuple[Symbol, ...]:
    """Views of so many heads each."""
    parts: list[Symbol] = []
    at = x.at
    for count in counts:
        parts.append(Symbol(x.value, at, count * head_dim, count, x.made))
        at += count * head_dim
    return tuple(parts)


def qk_norm(qk: Symbol, q_norm_A: torch.Tensor, k_norm_A: torch.Tensor, heads: int, eps: float) -> Symbol:
    """Every head normed in its place."""
    parts = split_heads(qk, (heads, qk.heads - heads), qk.width // qk.heads)
    for part, weight_A in zip(parts, (q_norm_A, k_norm_A), strict=True):
        line = Line(Op.RMS_NORM, x=part, y=part, heads=part.heads, number=eps, weight=_floats(weight_A))
        qk.recorder.add(line)
    return qk.recorder.changed(qk)


def rope_cos_sin(
    positions: Symbol, inv_freq_E: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[Symbol, Symbol]:
    """cos and sin of the step's positions, in float32 whatever the dtype."""
    del dtype
    half = len(inv_freq_E)
    angles = positions.recorder.new(2 * half)
    positions.recorder.add(Line(Op.ROPE_ANGLES, y=angles, number=scale, weight=_floats(inv_freq_E)))
    cos, sin = split_heads(angles, (1, 1), half)
    return cos, sin


def rope_axes_cos_sin(
    positions: Symbol, inv_freq_3E: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[Symbol, Symbol]:
    """The same of positions on three axes; a text token has one on all of them."""
    del dtype
    half = inv_freq_3E.shape[1]
    angles = positions.recorder.new(2 * half)
    positions.recorder.add(Line(Op.ROPE_AXES, y=angles, number=scale, weight=_floats(inv_freq_3E)))
    cos, sin = split_heads(angles, (1, 1), half)
    return cos, sin


def replace_rows(x: Symbol, media: Symbol, part: int) -> Symbol:
    """Rows of media in the places of tokens that read them; does nothing in a step without any."""
    del media  # the step brings it
    x.recorder.add(Line(Op.REPLACE_ROWS, x=x, y=x, layer=part))
    return x.recorder.changed(x)


def add_rows(x: Symbol, media: Symbol, part: int) -> Symbol:
    """Rows of media added to tokens that read them; does nothing in a step without any."""
    del media
    x.recorder.add(Line(Op.ADD_ROWS, x=x, y=x, layer=part))
    return x.recorder.changed(x)


def rope(x: Symbol, cos: Symbol, sin: Symbol) -> Symbol:
    """Every head turned in its place; cos and sin lie one behind the other."""
    angles = Symbol(cos.value, cos.at, cos.width + sin.width, made=cos.made)
    x.recorder.add(Line(Op.ROPE, x=x, y=x, z=angles, heads=x.heads))
    return x.recorder.changed(x)


def attend(how: Attention, qk: Symbol, v: Symbol, cos: Symbol, sin: Symbol) -> Symbol:
    """Turns queries and keys, writes the step's keys and values, then attends."""
    q, k = split_heads(rope(qk, cos, sin), (how.heads, qk.heads - how.heads), qk.width // qk.heads)
    q.recorder.add(Line(Op.KV_WRITE, x=k, z=v, layer=how.layer, heads=k.heads))
    y = q.recorder.new(q.width)
    line = Line(Op.ATTENTION, x=q, y=y, layer=how.layer, heads=q.heads, window=how.window or 0, number=how.scale)
    q.recorder.add(line)
    return y


def silu_mul(gate_up: Symbol) -> Symbol:
    """silu(gate) * up."""
    y = gate_up.recorder.new(gate_up.width // 2)
    gate_up.recorder.add(Line(Op.SILU_MUL, x=gate_up, y=y))
    return y


def largest(x: Symbol) -> Symbol:
    """The place of each row's largest, in the bits of a float, and its value.

    Of a product that was just made, which is then not written: 32 rows of a head of 49,152 took 8.2 to 9.8 ms, and
    take 7.1.
    """
    recorder, made = x.recorder, x.recorder.lines[-1]
    if made.op is not Op.LINEAR or made.y is not x:
        y = recorder.new(2)
        recorder.add(Line(Op.LARGEST, x=x, y=y))
        return y
    assert isinstance(made.weight, PackedWeight)
    assert made.x is not None
    if made.x.value.inputs is Inputs.MIXED:  # as of the rows that a head by itself is given
        made.x.value.inputs = Inputs.BYTES
    recorder.lines.pop()
    pairs = recorder.new(2 * made.weight.row_items)
    recorder.add(replace(made, op=Op.LINEAR_LARGEST, y=pairs))
    y = recorder.new(2)
    recorder.add(Line(Op.LARGEST_PAIR, x=pairs, y=y))
    recorder.changed(x)
    return y


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().contiguous()


@dataclass(slots=True, frozen=True)
class _Engine:
    """What prepared weights and programs share."""

    library: Library
    pool: Pool
    kv_dtype: torch.dtype
    arena: Arena
    deterministic: bool

    def linear(self, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None = None) -> Linear:
        return Linear(PackedWeight(self.library, weight_OI, bias_O, self.arena))

    def product(self, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None = None) -> Product:
        weight = PackedWeight(self.library, weight_OI, bias_O, self.arena, plain=True)
        if weight.inputs is not Inputs.FLOATS:
            raise ValueError("a product of tensors has a weight of floats")
        return Product(self.library, self.pool, weight)

    def table(self, table_VD: torch.Tensor | Blocks, head: Callable[[Symbol], Symbol] | None) -> Linear:
        """A head of the same weight is the table: it is packed once."""
        return head if isinstance(head, Linear) else self.linear(table_VD)

    def compile(self, mathematics: Callable[[Step[Symbol]], Symbol]) -> Program:
        recorder = Recorder()
        start = recorder.start()
        y = mathematics(Step(start, start, start, start, attend))
        recorder.finish(y)
        return Program(self, recorder, y.width)

    def compile_rows(self, mathematics: Callable[[Symbol], Symbol], width: int) -> RowsProgram:
        recorder = Recorder()
        x = recorder.new(width)
        recorder.add(Line(Op.TAKE, y=x))
        y = mathematics(x)
        recorder.finish(y)
        return RowsProgram(self, recorder, y.width)


class _Run:
    """A program, ready. Holds what its instructions point to."""

    def __init__(self, engine: _Engine, recorder: Recorder, width: int) -> None:
        recorded = Listing.of(recorder)
        self.listing = recorded.text()
        self.compiled: CompiledProgram = recorded.compile(engine.library, engine.kv_dtype)
        self._weights = [line.weight for line in recorder.lines]
        recorder.lines.clear()  # symbols and their recorder hold each other: weights must not hang on them
        self._pool = engine.pool
        self._memory = torch.empty(0, width)
        self._out = self._memory  # as much of it as the last step took

    def run(self, step: StepOfC) -> torch.Tensor:
        """float32 [tokens of the step, width], good until the next run.

        New memory for every step would be new pages, whose return interrupts all threads.
        """
        tokens = step.tokens
        if tokens > len(self._memory):
            width = self._memory.shape[1]
            self._memory = self._out = self._memory[:0]  # the old goes before the new comes
            self._memory = torch.empty(tokens, width)
        if tokens != len(self._out):
            self._out = self._memory[:tokens]
        step.output = self._out.data_ptr()
        if tokens:
            self.compiled.run(self._pool, step)
        return self._out


class Program(_Run):
    """A forward pass as one call. See kernels.ops.Pass."""

    def __init__(self, engine: _Engine, recorder: Recorder, width: int) -> None:
        writes = [line.heads for line in recorder.lines if line.op is Op.KV_WRITE]
        self._kv_heads = writes[0] if writes else 0
        self._deterministic = engine.deterministic
        super().__init__(engine, recorder, width)

    def warm(self, limits: Limits | None) -> Warmed:
        """See kernels.ops.Pass: nothing."""
        del limits
        return Warmed()

    def __call__(self, given: StepTensors) -> torch.Tensor:
        """What the mathematics gives for the tokens of a step."""
        rows, cache = given.rows, given.cache
        starts = (ctypes.c_int32 * len(rows.row_starts))(*rows.row_starts)
        contexts = (ctypes.c_int32 * rows.count)(*rows.context_lens)
        step = StepOfC(
            len(given.ids_T),
            rows.count,
            rows.block_table_RB.shape[1],
            given.ids_T.data_ptr(),
            given.positions_T.data_ptr(),
            given.slots_T.data_ptr(),
            ctypes.addressof(starts),
            ctypes.addressof(contexts),
            rows.block_table_RB.data_ptr(),
            cache.data_ptr(),
            cache.stride(0),
            rows.block_size,
            self._kv_heads,
            cache.shape[-1] - kv_width(cache.dtype, 0),
        )
        if rows.prompts is not None and not self._deterministic and any(rows.prompts):
            prompts = (ctypes.c_int32 * rows.count)(*rows.prompts)
            step.prompts = ctypes.addressof(prompts)
        media = given.media
        if media is None:
            return self.run(step)
        if media.rows_MPD.dtype is not torch.float32:
            raise ValueError(f"rows of media are float32 here, not {media.rows_MPD.dtype}")
        positions_3T, rows_MPD = media.positions_3T.contiguous(), media.rows_MPD.contiguous()
        row_of_T = torch.full((step.tokens,), -1, dtype=torch.int32)
        row_of_T[media.places_M] = torch.arange(len(rows_MPD), dtype=torch.int32)
        step.axes, step.media_of, step.media = positions_3T.data_ptr(), row_of_T.data_ptr(), rows_MPD.data_ptr()
        step.media_row = rows_MPD.stride(0)
        return self.run(step)


class RowsProgram(_Run):
    """A function of rows as one call: the head."""

    def __call__(self, x_XI: torch.Tensor) -> torch.Tensor:
        """What the mathematics gives for every row."""
        x_XI = x_XI.contiguous()
        return self.run(StepOfC(tokens=len(x_XI), input=x_XI.data_ptr()))
