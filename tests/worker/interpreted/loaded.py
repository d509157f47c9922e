"""Weights that are rounded as they are loaded, and caches of other types, end to end through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from services.worker.loading import load_model
from tests.worker.flat import Sequences
from tests.worker.tiny_llama import PROMPT, tiny_llama

slow = pytest.mark.slow


def logits(path: str, **options: str) -> tuple[torch.Tensor, dict[str, int], int]:
    """Those of a prompt in two pieces, the weights' bytes by type, and the bytes of one token's keys and values."""
    model, facts = load_model(path, **options)
    run = Sequences(model, [PROMPT])
    run.step([(0, len(PROMPT) - 1)])
    run.step([(0, 1)])
    return run.all_logits(0), facts.weight_memory, facts.kv_groups[0].bytes_per_token


# Errors of both factors add up over two layers. Numbers of 4 bits are spread over a group: 1/15 of 6 sigma.
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"quantize": "int8", "kv_cache_dtype": "fp8"}, 0.08),
        pytest.param({"quantize": "int8"}, 0.04, marks=slow),
        pytest.param({"quantize": "fp8"}, 0.12, marks=slow),
        pytest.param({"quantize": "int4"}, 0.4, marks=slow),
        pytest.param({"kv_cache_dtype": "bfloat16"}, 0.02, marks=slow),
        pytest.param({"kv_cache_dtype": "float16"}, 0.003, marks=slow),
    ],
)
def test_logits_are_near_those_of_floats(options, bound, tmp_path):
    path = str(tiny_llama(tmp_path / "tiny"))
    exact, _, token_bytes = logits(path, ops="reference")
    found, memory, token_bytes_found = logits(path, ops="triton", **options)
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < bound
    rounded = options.get("quantize")
    if rounded is not None:
        # Numbers and scales of seven matrices a layer and the head; the table, norms and biases are floats.
        numbers = 2 * (32 * 64 + 32 * 32 + 32 * 96 + 48 * 32) + 32 * exact.shape[1]
        per_number, padded = (0.5, 4) if rounded == "int4" else (1.0, 1)  # 32 inputs take the room of 128
        assert per_number * numbers < memory[rounded] < per_number * padded * numbers * 1.3
        assert memory["float32"] >= 4 * 32 * exact.shape[1]
    kept = {"fp8": 1, "bfloat16": 2, "float16": 2}.get(options.get("kv_cache_dtype", ""), 4)
    assert token_bytes_found == token_bytes * kept // 4
