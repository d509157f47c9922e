"""A model with quantized products in Triton's interpreter, against the same products by their references."""

from __future__ import annotations

import pytest

from services.worker.loading import load_model
from tests.bench.rounded import ROUNDED, rounded
from tests.worker import tiny
from tests.worker.flat import Sequences

slow = pytest.mark.slow


def logits_of(model):
    run = Sequences(model, [list(range(12))])
    run.step([(0, 11)])
    run.step([(0, 1)])
    return run.all_logits(0)


@slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_logits_are_those_of_rounded_products(kind, tmp_path):
    path = str(tiny.save(tiny.make("qwen3"), tmp_path))
    exact, _ = load_model(path, ops="reference", dtype="float32")
    model, facts = load_model(path, ops="triton", dtype="float32", quantize=kind)
    expected, weight_bytes = rounded(exact, {mode[4:]: each for mode, each in ROUNDED.items()}[kind])
    found, wanted, plain = (logits_of(each) for each in (model, expected, exact))
    # A number that lies between two may round either way, and then its row goes on by a step: far less than rounding.
    off = (found - wanted).norm()
    assert off < 0.1 * (wanted - plain).norm()
    assert weight_bytes <= facts.weight_bytes < 1.1 * weight_bytes
