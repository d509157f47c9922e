"""Small programs for the native kernels, written instruction by instruction."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from kernels.native import library as c
from kernels.native.build import CHOICES, Level, Unavailable, build
from kernels.native.program import OUTPUT, Op
from tests.kernels.paged import Case

EMULATED = {"emulated avx512": (), "emulated avx512-vnni": ("-DEMULATE_VNNI",)}
"""Levels that AVX2 stands in for."""
LEVELS = (*CHOICES[1:], *(pytest.param(level, marks=pytest.mark.slow) for level in EMULATED))
HALVES = "amx with halves"
"""The level that has a cache of bfloat16 of its own, with one of float16."""
NONE = c.View(-1, 0, 0)


@functools.cache
def load(level: str) -> c.Library:
    """The library of a level. Skips a test where this machine cannot run it."""
    try:
        if level == HALVES:
            library = copy.copy(c.load("amx"))
            library.cache_dtype = torch.float16
            return library
        return _emulated(level) if level in EMULATED else c.load(level)
    except Unavailable as error:
        pytest.skip(str(error))


def _emulated(level: str) -> c.Library:
    """The sources for AVX-512, over intrinsics that are pairs of AVX2's."""
    header = Path(__file__).with_name("emulated.h")
    flags = ("-O1", "-mavx2", "-mfma", "-mf16c", "-include", str(header), *EMULATED[level])
    with tempfile.TemporaryDirectory() as folder:
        return c.Library(build(Level(level.replace(" ", "-"), frozenset(), flags), Path(folder)), level)


@functools.cache
def pool(library: c.Library, threads: int = 2) -> c.Pool:
    """A pool that tests share."""
    return c.Pool(library, threads, 2000)


def instruction(op: int, **fields: object) -> c.Instruction:
    """An instruction; what is not named reads and writes nothing."""
    return c.Instruction(**{"op": op, "x": NONE, "y": NONE, "z": NONE, "quantized": -1, "heads": 1, **fields})


def run_rows(
    library: c.Library,
    x_TI: torch.Tensor,
    instructions: Sequence[c.Instruction],
    buffers: Sequence[c.Buffer],
    width: int,
    threads: int = 2,
    prompts: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Runs them after x was taken to buffer 0. [T, width] of the output, which is NaN before.

    `prompts`: of each row of the step, tokens of its prompt and others behind them; none: no token is of a prompt.
    """
    out = torch.full((len(x_TI), width), torch.nan)
    program = c.CompiledProgram(library, instructions, buffers)
    step = c.StepOfC(tokens=len(x_TI), input=x_TI.data_ptr(), output=out.data_ptr())
    starts = torch.tensor([0, *(prompt + others for prompt, others in prompts)], dtype=torch.int32).cumsum(0).int()
    of_prompts = torch.tensor([prompt for prompt, _ in prompts], dtype=torch.int32)
    if prompts:
        assert starts[-1] == len(x_TI)
        step.rows, step.row_starts, step.prompts = len(prompts), starts.data_ptr(), of_prompts.data_ptr()
    program.run(pool(library, threads), step)
    return out


def product(
    library: c.Library,
    weight: c.PackedWeight,
    x_TI: torch.Tensor,
    threads: int = 2,
    prompts: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """x times the weight; x is rounded first where the weight is quantized."""
    outputs, inputs = weight.shape
    rounded = weight.inputs is not c.Inputs.FLOATS
    x = c.View(0, 0, inputs)
    lines = [
        instruction(Op.TAKE, y=x, quantized=1 if rounded else -1),
        instruction(
            Op.LINEAR, x=c.View(1 if rounded else 0, 0, inputs), y=c.View(OUTPUT, 0, outputs), weight=weight.address
        ),
    ]
    buffers = [c.Buffer(inputs, c.Inputs.FLOATS), c.Buffer(inputs, weight.inputs)]
    return run_rows(library, x_TI.contiguous(), lines, buffers, outputs, threads, prompts)


def largest_product(library: c.Library, weight: c.PackedWeight, x_TI: torch.Tensor, threads: int = 2) -> torch.Tensor:
    """What the same product's largest are, as the op writes them: [T, 2]."""
    inputs, rounded = weight.shape[1], weight.inputs is not c.Inputs.FLOATS
    x, pairs = c.View(0, 0, inputs), c.View(2, 0, 2 * weight.row_items)
    read = c.View(1 if rounded else 0, 0, inputs)
    lines = [
        instruction(Op.TAKE, y=x, quantized=1 if rounded else -1),
        instruction(Op.LINEAR_LARGEST, x=read, y=pairs, weight=weight.address),
        instruction(Op.LARGEST_PAIR, x=pairs, y=c.View(OUTPUT, 0, 2)),
    ]
    buffers = [c.Buffer(inputs, c.Inputs.FLOATS), c.Buffer(inputs, weight.inputs), c.Buffer(pairs.width, 0)]
    return run_rows(library, x_TI.contiguous(), lines, buffers, 2, threads)


def written(library: c.Library, case: Case, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A native cache full of NaN, to which the case's keys and values were written; dtype None: the build's own."""
    dtype = dtype or library.cache_dtype
    blocks, size, kv_heads, width = case.k_cache.shape
    numbers = (1, 2, blocks, kv_heads, size, c.kv_width(dtype, width))
    nothing = -1 if dtype is torch.int8 else torch.nan  # bytes of -1 are the scale NaN
    cache = torch.full(numbers, nothing, dtype=dtype)
    known = torch.arange(blocks * size)
    known = known[~case.k_cache.reshape(blocks * size, -1).isnan().any(-1)]
    kv = torch.cat([case.k_cache.reshape(blocks * size, -1)[known], case.v_cache.reshape(blocks * size, -1)[known]], -1)
    k, v = c.View(0, 0, kv_heads * width), c.View(0, kv_heads * width, kv_heads * width)
    write = [instruction(Op.TAKE, y=c.View(0, 0, kv.shape[1])), instruction(Op.KV_WRITE, x=k, z=v)]
    program = c.CompiledProgram(library, write, [c.Buffer(kv.shape[1], 0)], dtype)
    step = c.StepOfC(tokens=len(kv), slots=known.data_ptr(), input=kv.data_ptr(), **_shape(case, cache))
    program.run(pool(library), step)
    return cache


def attend(
    library: c.Library,
    case: Case,
    window: int | None,
    scale: float,
    threads: int = 2,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the case, whose keys and values are in the cache, or are first written to one."""
    cache = written(library, case) if cache is None else cache
    tokens, heads, width = case.q.shape
    q, out = case.q.reshape(tokens, -1).contiguous(), torch.full((tokens, heads * width), torch.nan)
    whole, result = c.View(0, 0, heads * width), c.View(OUTPUT, 0, heads * width)
    lines = [
        instruction(Op.TAKE, y=whole),
        instruction(Op.ATTENTION, x=whole, y=result, heads=heads, window=window or 0, number=scale),
    ]
    starts = torch.tensor(case.rows.row_starts, dtype=torch.int32)
    contexts = torch.tensor(case.rows.context_lens, dtype=torch.int32)
    table = case.rows.block_table_RB
    step = c.StepOfC(
        tokens=tokens,
        rows=case.rows.count,
        table_width=table.shape[1],
        row_starts=starts.data_ptr(),
        contexts=contexts.data_ptr(),
        blocks=table.data_ptr(),
        input=q.data_ptr(),
        output=out.data_ptr(),
        **_shape(case, cache),
    )
    c.CompiledProgram(library, lines, [c.Buffer(heads * width, 0)], cache.dtype).run(pool(library, threads), step)
    return out.view(tokens, heads, width)


def _shape(case: Case, cache: torch.Tensor) -> dict[str, int]:
    _, size, kv_heads, width = case.k_cache.shape
    places = {"cache": cache.data_ptr(), "cache_layer": cache.stride(0)}
    return {**places, "block_size": size, "kv_heads": kv_heads, "head_size": width}


def expect_equal_rows(
    multiply: Callable[[torch.Tensor, int], torch.Tensor], inputs: int, counts: Iterable[int]
) -> None:
    """A row of x gives the same to the last bit among so many others, at any place, for any number of threads."""
    row = torch.randn(1, inputs)
    expected = multiply(row, 2)[0]
    for count in counts:
        x = torch.randn(count, inputs)
        places = {0, count // 2, count - 1}
        for place in places:
            x[place] = row
        y = multiply(x, 1 + count % 3)
        for place in places:
            assert torch.equal(y[place], expected), (count, place)
