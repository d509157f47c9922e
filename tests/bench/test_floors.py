"""Floors by hand, for a machine and a model of round numbers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from kernels.native import library as native
from services.worker.models.config import ModelConfig, RopeConfig
from tests.bench import growth
from tests.bench.floors import Costs, Machine, report, text
from tests.bench.load.workloads import Workload

AT = Machine(bytes=1000.0, float_products=100.0, byte_products=400.0)
COSTS = Costs(
    weight_bytes=2000, kv_bytes=10, layer_products=300, head_products=100, attention_products=1, quantized=True
)


def shapes(**other) -> ModelConfig:
    known = {
        "architecture": "llama",
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "max_model_len": 99,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "windows": (None, None, None),
        "rope": RopeConfig("default", 10000.0),
        "dtype": "float32",
    }
    return ModelConfig(**{**known, **other})


def test_costs_of_a_model() -> None:
    costs = Costs.of(shapes(), 5000, 24, quantized=False)
    # q, k and v are 8 x 16, the output 8 x 8, gate, up and down 8 x 16 each.
    assert costs.layer_products == 3 * (128 + 64 + 3 * 128)
    assert (costs.head_products, costs.attention_products) == (400, 3 * 2 * 8)
    assert (costs.weight_bytes, costs.kv_bytes) == (5000, 24)
    untied = Costs.of(shapes(tie_word_embeddings=False), 2528, 24, quantized=False)
    assert untied.weight_bytes == 2128


def test_one_token_waits_for_memory_and_many_for_products() -> None:
    assert COSTS.step_s(AT, 1, 20) == pytest.approx((2000 + 200) / 1000)
    assert COSTS.step_s(AT, 8, 20) == pytest.approx(8 * 400 / 400 + 8 * 20 / 100)
    slow = Machine(1000.0, 100.0, 0.0)
    assert COSTS.step_s(slow, 8, 20) == pytest.approx(8 * 400 / 100 + 8 * 20 / 100)


def test_a_prompt_takes_one_head_and_sees_half_of_itself() -> None:
    assert COSTS.prompt_s(AT, 40) == pytest.approx((40 * 300 + 100) / 400 + 40 * 20 / 100)
    assert COSTS.prompt_s(AT, 40, 60) == pytest.approx((40 * 300 + 100) / 400 + 40 * 80 / 100)


def test_a_workload_is_its_prompts_and_its_steps() -> None:
    work = Workload("W", "", clients=2, requests=6, prompt_tokens=40, output_tokens=9)
    steps = 6 / 2 * 8 * COSTS.step_s(AT, 2, 44.5)
    assert COSTS.workload_s(AT, work) == pytest.approx(6 * COSTS.prompt_s(AT, 40) + steps)
    shared = Workload("W", "", 2, 6, 40, 9, shared_prefix_tokens=30)
    prompts = COSTS.prompt_s(AT, 30) + 6 * COSTS.prompt_s(AT, 10, 30)
    assert COSTS.workload_s(AT, shared) == pytest.approx(prompts + steps)
    alone = Workload("W", "", 1, 2, 100, 3, shared_prefix_tokens=90)
    read_once = 2 * 2 * max(2.0 + (11.5 + 90) * 10 / 1000, 400 / 400 + 101.5 / 100)
    prompts = COSTS.prompt_s(AT, 90) + 2 * COSTS.prompt_s(AT, 10, 90)
    assert COSTS.workload_s(AT, alone) == pytest.approx(prompts + read_once)
    found = report(AT, COSTS, [work])
    assert found["workloads"]["W"]["output_tokens_per_s"] == pytest.approx(54 / COSTS.workload_s(AT, work))
    assert json.loads(json.dumps(found)) == found
    assert "| W " in text(found)
    assert "| 8 x 1 " in text(found)


def test_bytes_of_packed_weights_are_their_own() -> None:
    library = native.load("auto")
    arena = native.Arena(library)
    plain, other = (native.PackedWeight(library, torch.ones(size, 32), arena=arena) for size in (16, 32))
    model = SimpleNamespace(kept=[plain, other, plain, object()], cache=torch.zeros(1, dtype=torch.float16))
    asked = growth.costs(model, "f32")
    assert asked.weight_bytes == 4 * 32 * (16 + 32)
    assert asked.kv_bytes == 2 * 2 * 30 * 3 * 64


@pytest.mark.slow
def test_the_machine_is_measured() -> None:
    found = Machine.measured(2, read=1 << 22, times=1000, windows=3)
    assert found.bytes > 1e8
    assert found.float_products > 1e8
    assert found.byte_products >= 0
