"""The deterministic mode of a whole model: logits that are equal to the last bit, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from kernels.native.ops import NativeOptions
from services.worker.loading import load_model
from tests.worker import tiny
from tests.worker.flat import Sequences
from tests.worker.test_models import random_ids

MODES: dict[str, dict[str, str]] = {
    "torch": {"ops": "torch"},
    "native": {"ops": "native", "dtype": "float32"},
    "native-int8": {"ops": "native", "quantize": "int8"},
}


@pytest.fixture(scope="module", params=MODES)
def model(request, tmp_path_factory):
    sizes = {"hidden_size": 96, "intermediate_size": 96, "sliding_window": 20}  # whole groups of 32, heads of 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.KINDS, "wide", ("Mistral", sizes))
        folder = tiny.save(tiny.make("wide"), tmp_path_factory.mktemp("m"))
    native = NativeOptions(threads=2)
    return load_model(str(folder), deterministic=True, native=native, **MODES[request.param])[0]


@pytest.fixture(scope="module")
def ids():
    return random_ids(100, 99, 4)


@pytest.fixture(scope="module")
def alone(model, ids):
    run = Sequences(model, [ids])
    run.step([(0, 100)])
    return run.all_logits(0)


@pytest.mark.parametrize(
    "sizes",
    [[1] * 30 + [70], [68] + [1] * 32, [99, 1], [1, 99], [33, 32, 35], [16, 84], [7] * 14 + [2], [64, 36]],
    ids=str,
)
def test_chunking(model, ids, alone, sizes):
    run = Sequences(model, [ids], seed=len(sizes))
    for size in sizes:
        run.step([(0, size)])
    assert torch.equal(run.all_logits(0), alone)


def test_every_batch_size_from_1_to_70(model, ids, alone):
    """Position 80 is decoded beside 0 to 69 other rows."""
    for others in range(70):
        run = Sequences(model, [ids, *(random_ids(2, 99, index) for index in range(others))], seed=others)
        run.step([(0, 80), *((index, 1) for index in range(1, others + 1))])
        place = (others * others) % (others + 1)
        rows = list(range(1, others + 1))
        run.step((index, 1) for index in [*rows[:place], 0, *rows[place:]])
        assert torch.equal(run.all_logits(0), alone[:81]), others


def test_decode_beside_prefill(model, ids, alone):
    run = Sequences(model, [random_ids(90, 99, 8), ids, random_ids(40, 99, 9)])
    run.step([(1, 60)])
    for _ in range(30):
        run.step([(0, 3), (1, 1), (2, 1)])
    assert torch.equal(run.all_logits(1), alone[:90])


def test_a_layer_of_real_size(tmp_path, monkeypatch):
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    monkeypatch.setitem(tiny.KINDS, "real", ("Llama", {**shape, "num_hidden_layers": 1, "vocab_size": 3001}))
    model, _ = load_model(str(tiny.save(tiny.make("real"), tmp_path)), deterministic=True)
    ids = random_ids(150, 3001, 2)
    whole = Sequences(model, [ids])
    whole.step([(0, 150)])
    parts = Sequences(model, [random_ids(200, 3001, 3), ids, *([5] for _ in range(40))], seed=1)
    parts.step([(0, 70), (1, 101)])
    parts.step([(0, 1), *((index, 1) for index in range(2, 42)), (1, 1)])
    parts.step([(1, 48), (0, 100)])
    assert torch.equal(parts.all_logits(1), whole.all_logits(0))
