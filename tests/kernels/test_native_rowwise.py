from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from kernels.linear.blocks import Blocks
from kernels.native import library as c
from kernels.native.ops import NativeOptions, native_ops
from kernels.native.program import OUTPUT, Op
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rope import reference as rope_reference
from kernels.silu_mul import reference as silu_mul_reference
from tests.kernels.native import LEVELS, instruction, load, pool, run_rows

WIDTHS = (1, 5, 16, 40, 64, 576)


def take(width):
    return instruction(Op.TAKE, y=c.View(0, 0, width))


@pytest.mark.parametrize("level", LEVELS)
def test_norms(level):
    library = load(level)
    for width in WIDTHS:
        x, weight = torch.randn(7, width), torch.randn(width)
        whole, out = c.View(0, 0, width), c.View(OUTPUT, 0, width)
        line = instruction(Op.RMS_NORM, x=whole, y=out, number=1e-5, weight=weight.data_ptr())
        y = run_rows(library, x, [take(width), line], [c.Buffer(width, 0)], width)
        torch.testing.assert_close(y, rms_norm_reference.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
        pair = torch.cat([x, torch.randn(7, width)], 1)
        added, residual = c.View(0, 0, width), c.View(0, width, width)
        line = instruction(Op.ADD_RMS_NORM, x=added, z=residual, y=out, number=1e-5, weight=weight.data_ptr())
        y = run_rows(library, pair, [take(2 * width), line], [c.Buffer(2 * width, 0)], width)
        expected, _ = rms_norm_reference.add_rms_norm(x, pair[:, width:], weight, 1e-5)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_norm_of_every_head_in_its_place(level):
    x, weight = torch.randn(5, 4 * 24), torch.randn(24)
    part = c.View(0, 24, 48)
    lines = [
        take(96),
        instruction(Op.RMS_NORM, x=part, y=part, heads=2, number=1e-6, weight=weight.data_ptr()),
        instruction(Op.SILU_MUL, x=c.View(0, 0, 96), y=c.View(OUTPUT, 0, 48)),
    ]
    y = run_rows(load(level), x, lines, [c.Buffer(96, 0)], 48)
    normed = x.view(5, 4, 24).clone()
    normed[:, 1:3] = rms_norm_reference.rms_norm(normed[:, 1:3], weight, 1e-6)
    torch.testing.assert_close(y, silu_mul_reference.silu_mul(normed.view(5, 96)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_silu_mul(level):
    for width in WIDTHS:
        x = torch.randn(6, 2 * width) * 10
        x[0, 0], x[1, 0], x[2, 0], x[3, -1] = 1e4, -1e4, -90.0, torch.nan
        line = instruction(Op.SILU_MUL, x=c.View(0, 0, 2 * width), y=c.View(OUTPUT, 0, width))
        y = run_rows(load(level), x, [take(2 * width), line], [c.Buffer(2 * width, 0)], width)
        torch.testing.assert_close(y, silu_mul_reference.silu_mul(x), atol=1e-6, rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [2, 32, 64, 80, 128])
def test_rope(level, size):
    library, positions = load(level), torch.tensor([0, 1, 17, 8191, 1_000_000])
    x, frequency = torch.randn(5, 3 * size), 10000.0 ** -(torch.arange(size // 2) * 2 / size)
    whole, angles = c.View(0, 0, 3 * size), c.View(1, 0, size)
    # turned in its place, then normed, so that it leaves the buffer
    ones = torch.ones(3 * size)
    lines = [
        take(3 * size),
        instruction(Op.ROPE_ANGLES, y=angles, number=0.5, weight=frequency.data_ptr()),
        instruction(Op.ROPE, x=whole, y=whole, z=angles, heads=3),
        instruction(Op.RMS_NORM, x=whole, y=c.View(OUTPUT, 0, 3 * size), number=1e-9, weight=ones.data_ptr()),
    ]
    buffers = [c.Buffer(3 * size, 0), c.Buffer(size, 0)]
    result = torch.full((5, 3 * size), torch.nan)
    step = c.StepOfC(tokens=5, positions=positions.data_ptr(), input=x.data_ptr(), output=result.data_ptr())
    c.CompiledProgram(library, lines, buffers).run(pool(library), step)
    cos, sin = rope_reference.rope_cos_sin(positions, frequency, 0.5, torch.float32)
    turned = rope_reference.rope(x.view(5, 3, size), cos, sin).reshape(5, -1)
    expected = rms_norm_reference.rms_norm(turned, ones, 1e-9)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_every_kind_of_table(level):
    library, ids = load(level), torch.tensor([0, 36, 5, 5, 17])
    numbers, scale = torch.randint(0, 16, (37, 64), dtype=torch.uint8), torch.rand(37, 2).half()
    tables = [torch.randn(37, 40), torch.randn(37, 40).half(), torch.randn(37, 40).bfloat16()]
    blocks = [Blocks(numbers, scale, (-scale).half(), 4), Blocks(numbers * 16, scale, None, 8)]
    for table in [*tables, *blocks]:
        packed = c.PackedWeight(library, table)
        width = table.shape[1]
        line = instruction(Op.EMBEDDING, y=c.View(OUTPUT, 0, width), weight=packed.address)
        out = torch.full((5, width), torch.nan)
        step = c.StepOfC(tokens=5, ids=ids.data_ptr(), output=out.data_ptr())
        c.CompiledProgram(library, [line], []).run(pool(library), step)
        plain = table.float() if isinstance(table, torch.Tensor) else table.dequantize()
        torch.testing.assert_close(out, plain[ids], atol=1e-6, rtol=1e-6)


def largest(library, logits):
    ids = torch.full((len(logits),), -1, dtype=torch.int32)
    function = library.calls.triptych_largest
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p)
    function(pool(library).address, logits.data_ptr(), *logits.shape, logits.stride(0), ids.data_ptr())
    return ids


def top(library, logits, k):
    ids, values = torch.full((len(logits), k), -1, dtype=torch.int32), torch.full((len(logits), k), torch.nan)
    function = library.calls.triptych_top
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_void_p)
    addresses = ids.data_ptr(), values.data_ptr()
    function(pool(library).address, logits.data_ptr(), *logits.shape, logits.stride(0), k, *addresses)
    return ids, values


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocabulary", [1, 7, 100, 1023, 5000])
def test_the_largest_logits(level, vocabulary):
    library = load(level)
    logits = torch.cat([torch.randn(5, vocabulary), torch.randn(3, vocabulary).round(), torch.zeros(1, vocabulary)])
    logits[4, vocabulary // 2 :] = -torch.inf
    assert torch.equal(largest(library, logits).long(), logits.argmax(1))
    for k in sorted({1, min(3, vocabulary), min(64, vocabulary), vocabulary}):
        ids, values = top(library, logits, k)
        order = logits.sort(dim=1, descending=True, stable=True)
        assert torch.equal(values, order.values[:, :k])
        assert torch.equal(ids.long(), order.indices[:, :k])
    logits[2, vocabulary // 3] = torch.nan
    assert largest(library, logits)[2] == vocabulary // 3
    assert top(library, logits, 1)[0][2] == vocabulary // 3


def test_largest_as_an_instruction():
    x = torch.randn(9, 300)
    lines = [take(300), instruction(Op.TAKE + 1, x=c.View(0, 0, 300), y=c.View(OUTPUT, 0, 2))]
    y = run_rows(load("auto"), x, lines, [c.Buffer(300, 0)], 2)
    assert torch.equal(y[:, 0].contiguous().view(torch.int32).long(), x.argmax(1))
    assert torch.equal(y[:, 1], x.amax(1))


def test_largest_of_a_product_takes_its_place():
    """Nobody can read the product any more; a largest of anything else stays an instruction of its own."""
    ops = native_ops(NativeOptions(), torch.float16, 64)
    x, head = torch.randn(5, 96), ops.prepare_linear(torch.randn(300, 96), None)
    programs = [
        ops.compile_rows(lambda x: ops.largest(head(x)), 96),
        ops.compile_rows(lambda x: ops.largest(ops.silu_mul(head(x))), 96),
    ]
    assert ["linear_largest" in program.listing for program in programs] == [True, False]
    logits = ops.compile_rows(head, 96)(x).clone()
    assert torch.equal(programs[0](x)[:, 1], logits.amax(1))
    assert torch.equal(programs[0](x)[:, 0].contiguous().view(torch.int32).long(), logits.argmax(1))
    with pytest.raises(ValueError, match="overwritten"):
        ops.compile_rows(lambda x: [y := head(x), ops.largest(y), ops.silu_mul(y)][2], 96)


def test_a_pool_under_stress():
    """Many short runs by pools of 1 to 5 threads, two at once, that spin, sleep and wake."""
    library, width = load("auto"), 32
    weight = c.PackedWeight(library, torch.eye(width))
    lines = [take(width)]
    lines += [
        instruction(Op.LINEAR, x=c.View(at % 2, 0, width), y=c.View(1 - at % 2, 0, width), weight=weight.address)
        for at in range(20)
    ]
    lines.append(instruction(Op.LINEAR, x=c.View(0, 0, width), y=c.View(OUTPUT, 0, width), weight=weight.address))
    failures = []

    def drive(threads, spins, seed):
        own = c.Pool(library, threads, spins)
        program = c.CompiledProgram(library, lines, [c.Buffer(width, 0), c.Buffer(width, 0)])
        for turn in range(300):
            x = torch.arange(float((1 + (turn * seed) % 40) * width)).view(-1, width)
            out = torch.full_like(x, torch.nan)
            program.run(own, c.StepOfC(tokens=len(x), input=x.data_ptr(), output=out.data_ptr()))
            if not torch.equal(x, out):
                failures.append((threads, spins, turn))
            if turn % 50 == 0:
                time.sleep(0.001)

    for threads, spins in ((1, 0), (2, 0), (2, 2000), (3, 50), (5, 2000)):
        drivers = [threading.Thread(target=drive, args=(threads, spins, seed)) for seed in (3, 7)]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()
    assert not failures


def test_times_of_instructions():
    library, width = load("auto"), 64
    weight = c.PackedWeight(library, torch.randn(width, width))
    view, out = c.View(0, 0, width), c.View(OUTPUT, 0, width)
    lines = [take(width), instruction(Op.LINEAR, x=view, y=out, weight=weight.address)]
    program = c.CompiledProgram(library, lines, [c.Buffer(width, 0)])
    calls = library.calls
    calls.triptych_profile.argtypes = (ctypes.c_void_p, ctypes.c_int)
    calls.triptych_times.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    times = (ctypes.c_double * 2)()
    x, y = torch.randn(200, width), torch.empty(200, width)
    step = c.StepOfC(tokens=200, input=x.data_ptr(), output=y.data_ptr())
    calls.triptych_profile(program._address, 1)
    begin = time.perf_counter()
    for _ in range(3):
        program.run(pool(library), step)
    took = time.perf_counter() - begin
    calls.triptych_times(program._address, ctypes.addressof(times))
    assert times[1] > 0.0
    assert times[0] + times[1] < took
    calls.triptych_profile(program._address, 0)
    program.run(pool(library), step)
    calls.triptych_times(program._address, ctypes.addressof(times))
    assert list(times) == [0.0, 0.0]
