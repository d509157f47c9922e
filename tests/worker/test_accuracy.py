"""What fewer bits may cost the demo model, on plain English. `python -m tests.bench.accuracy` measures it on more."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.native import build
from tests.bench import accuracy, rounded

KL, PERPLEXITY = 0.02, 1.02
"""At most, where weights are quantized: nats to float32, and how many times its perplexity."""
KL_OF_A_SCALE_PER_TOKEN = 0.15
"""At most, where weights or inputs have one scale for a whole row, or weights are rounded to 4 bits twice."""
KL_16_BIT, TOP1_16_BIT = 0.001, 0.99


@pytest.fixture(scope="module")
def figures(demo_gguf: Path) -> dict[str, accuracy.Figures]:
    try:
        build.find()
    except build.Unavailable as error:
        pytest.skip(str(error))
    return accuracy.measure(demo_gguf, ["own", "float16", "int8"], tokens=128, window=128, prompts=0)


@pytest.mark.parametrize("mode", ["own", "int8"])
def test_quantized_weights_stay_close_to_float32(figures, mode):
    assert 0 < figures[mode].kl <= KL
    assert figures[mode].perplexity_ratio <= PERPLEXITY


def test_weights_of_16_bits_are_as_good_as_float32(figures):
    assert 0 < figures["float16"].kl <= KL_16_BIT
    assert figures["float16"].top1 >= TOP1_16_BIT


@pytest.mark.slow
def test_every_way_on_a_longer_text(demo_gguf):
    figures = accuracy.measure(demo_gguf, list(accuracy.MODES), prompts=0)
    for mode in ("float16", "bfloat16"):
        assert figures[mode].kl <= KL_16_BIT
        assert figures[mode].top1 >= TOP1_16_BIT
    for mode in ("own", "int8"):
        assert figures[mode].kl <= KL
        assert figures[mode].perplexity_ratio <= PERPLEXITY
    for mode in rounded.ROUNDED:
        assert 0 < figures[mode].kl <= KL_OF_A_SCALE_PER_TOKEN


def test_weights_take_the_bytes_that_their_bits_say(figures):
    weights = 134_479_872  # beside norms
    assert figures["float16"].weight_bytes == pytest.approx(2 * weights, rel=0.01)
    assert figures["int8"].weight_bytes == pytest.approx(34 / 32 * weights, rel=0.01)
    table = 49152 * 576
    assert figures["own"].weight_bytes == pytest.approx(20 / 32 * (weights - table) + 34 / 32 * table, rel=0.01)
