"""Writes to the cache in Triton's interpreter: with turning, and in other types than the model's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels import eager
from kernels.dispatch import choose_ops
from kernels.kv_write import float8
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write.triton import kv_write
from kernels.kv_write.turned import turn_and_write
from kernels.rope import reference as rope_reference
from tests.kernels.interpreted.memory import TOLERANCE, inside

REFERENCE = choose_ops("reference")
write_apart = eager.turn_and_write(rope_reference.rope, kv_write_reference.kv_write)


def numbers_of_float8() -> torch.Tensor:
    """All 256."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@triton.jit
def _round_trip(x, bits, wide, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    # One program stores all of x and reads it again.
    at = tl.arange(0, BLOCK)
    found = float8.stored(tl.load(x + at, mask=at < COUNT, other=0.0), bits.dtype.element_ty)
    tl.store(bits + at, found, mask=at < COUNT)
    tl.store(wide + at, float8.widened(found), mask=at < COUNT)


def round_trip(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits, wide = torch.zeros(len(x), dtype=torch.uint8), torch.empty(len(x), dtype=torch.float16)
    _round_trip[(1,)](x, bits, wide, len(x), 1 << (len(x) - 1).bit_length())
    return bits, wide


def test_the_bits_of_float8_are_torchs():
    exact = numbers_of_float8().float()
    middles = (exact[:126] + exact[1:127]) / 2  # ties
    around = torch.cat((middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.rand(500) * 2.0**-5))
    found = [500.0, 1e30, torch.inf, -torch.inf, 1e-30, 1e-42, -0.0]
    x = torch.cat((exact, around, -around, torch.randn(500) * 30, torch.tensor(found)))
    bits, wide = round_trip(x)
    expected = kv_write_reference.stored(x, torch.float8_e4m3fn)
    # All NaN are one: its sign says nothing.
    same = (bits == expected.view(torch.uint8)) | (expected.float().isnan() & (bits & 0x7F == 0x7F))
    assert bool(same.all()), x[~same]
    assert torch.equal(wide.float().nan_to_num(777.0), expected.float().nan_to_num(777.0))


def test_what_is_beyond_the_largest_is_the_largest():
    large = torch.tensor([448.0, 464.0, 1e9, -torch.inf])
    assert kv_write_reference.stored(large, torch.float8_e4m3fn).float().tolist() == [448.0, 448.0, 448.0, -448.0]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(1, 1, 1, 2), (5, 6, 2, 24), (3, 7, 1, 200)])
def test_turned_keys_and_values_lie_in_their_slots_and_nowhere_else(tokens, heads, kv_heads, size, dtype):
    qk, v = (inside(torch.randn(tokens, count, size).to(dtype)) for count in (heads + kv_heads, kv_heads))
    angles = rope_reference.rope_cos_sin(torch.arange(tokens) * 113, torch.rand(size // 2), 1.0, dtype)
    slots = torch.tensor([17, -1, 3, 8, -1][:tokens])
    ours, expected = (torch.full((2, 3, 8, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2))
    found = turn_and_write(qk, v, angles, ours, slots)
    exact = write_apart(qk.double(), v.double(), tuple(x.double() for x in angles), expected, slots)
    torch.testing.assert_close(found.double(), exact, **TOLERANCE[dtype])
    torch.testing.assert_close(ours[0], expected[0], equal_nan=True, **TOLERANCE[dtype])
    assert torch.equal(ours[1].nan_to_num(777.0), expected[1].nan_to_num(777.0))


def test_angles_of_three_axes_turn_alike():
    qk, v = torch.randn(4, 3, 16), torch.randn(4, 1, 16)
    frequencies = torch.rand(8) * (torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]) == torch.arange(3)[:, None])
    angles = REFERENCE.rope_axes_cos_sin(torch.randint(0, 900, (3, 4)), frequencies, 1.0, torch.float32)
    ours, expected = torch.zeros(2, 2, 2, 4, 1, 16)
    slots = torch.tensor([7, 0, 1, 2])
    torch.testing.assert_close(
        turn_and_write(qk, v, angles, ours, slots), write_apart(qk, v, angles, expected, slots), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kept", [float8.FLOAT8, torch.bfloat16], ids=["float8", "bfloat16"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_a_cache_of_another_type_keeps_the_nearest(kept, fused, dtype):
    """Without a turn, so that bits can be compared."""
    qk, v = (torch.randn(3, count, 8).mul(200).to(dtype) for count in (3, 2))
    ours, expected = (torch.zeros(2, 2, 4, 2, 8).to(kept) for _ in range(2))
    slots = torch.tensor([6, -1, 1])
    if fused:
        turn_and_write(qk, v, (torch.ones(3, 4), torch.zeros(3, 4)), ours, slots)
    else:
        kv_write(qk[:, 1:], v, ours[0], ours[1], slots)
    kv_write_reference.kv_write(qk[:, 1:], v, expected[0], expected[1], slots)
    # The interpreter cuts off what bfloat16 has no bits for, where a GPU rounds: a last bit is 2^-7 at most.
    rtol = 0 if kept == float8.FLOAT8 else 2**-7
    torch.testing.assert_close(ours.float(), expected.float(), atol=0, rtol=rtol)


@pytest.mark.slow
def test_bfloat16_is_turned_and_written():
    qk, v = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 2, 64).bfloat16()
    angles = rope_reference.rope_cos_sin(torch.arange(3), torch.rand(32), 1.0, torch.bfloat16)
    ours, expected = torch.zeros(2, 2, 1, 4, 2, 64).bfloat16()
    found = turn_and_write(qk, v, angles, ours, torch.arange(3))
    exact = write_apart(qk.float(), v.float(), tuple(x.float() for x in angles), expected, torch.arange(3))
    torch.testing.assert_close(found.float(), exact, atol=0.01, rtol=0.01)  # a last bit is 2^-8
    torch.testing.assert_close(ours.float(), expected.float(), atol=0.01, rtol=0.01)
