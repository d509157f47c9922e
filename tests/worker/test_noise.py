"""The counter-based noise: published numbers, equality of both implementations, distribution."""

from __future__ import annotations

import math

import pytest
import torch

from services.worker.sampling.counter import GOLDEN, draw, key, mix, signed
from services.worker.sampling.noise import bits, counters, gumbel, nearly

CPU = torch.device("cpu")


def test_the_mixer_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567 + index * GOLDEN) for index in range(1, 5)] == published


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (2**64 - 1, 8191), (123456789, 42)])
def test_int64_arithmetic_gives_the_same_bits(seed: int, position: int) -> None:
    ids = torch.arange(1000)
    position_key = key(seed, position)
    drawn = bits(counters(ids) + signed(position_key)).tolist()
    assert drawn == [draw(position_key, token) >> 11 for token in range(1000)]


def test_exact_noise_is_the_formula() -> None:
    position_key = key(5, 6)
    noise = gumbel(torch.tensor([[signed(position_key)]]), torch.arange(300).unsqueeze(0))[0].tolist()
    for token, value in enumerate(noise):
        uniform = ((draw(position_key, token) >> 11) + 0.5) * 2.0**-53
        assert value == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-12)


def test_rough_noise_is_close_enough() -> None:
    ids = torch.arange(1_000_000)
    keys = torch.tensor([[signed(key(1, 2))]])
    rough = nearly(keys, counters(ids)).double()
    exact = gumbel(keys, ids.unsqueeze(0))
    assert float((rough - exact).abs().max()) < 0.05


@pytest.mark.parametrize("over", ["tokens", "positions", "seeds"])
def test_uniform_along_every_axis(over: str) -> None:
    """Chi-square with 255 degrees of freedom; the numbers are fixed, so the test never flickers."""
    count = 1 << 16
    if over == "tokens":
        drawn = (bits(counters(torch.arange(count)) + signed(key(3, 4))) >> 45).tolist()
    elif over == "positions":
        drawn = [draw(key(3, position), 4) >> 56 for position in range(count)]
    else:
        drawn = [draw(key(seed, 3), 4) >> 56 for seed in range(count)]
    observed = [0] * 256
    for value in drawn:
        observed[value] += 1
    expected = count / 256
    chi_square = sum((seen - expected) ** 2 / expected for seen in observed)
    assert 170 < chi_square < 355  # 1e-5 on either side
