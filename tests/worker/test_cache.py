from __future__ import annotations

import pytest
import torch

from services.common.errors import FailedPrecondition
from services.worker.cache import KVCache, KvLayout
from services.worker.step import CacheShape

LAYOUT = KvLayout(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16)


def test_bytes():
    assert LAYOUT.bytes_per_token == 3 * 2 * 2 * 8 * 2
    assert LAYOUT.bytes_per_block(16) == 16 * LAYOUT.bytes_per_token


def test_layers_have_tensors_of_their_own():
    cache = KVCache(LAYOUT, CacheShape(5, 4, 2, 64, 64), torch.device("cpu"))
    assert cache.nbytes == 5 * LAYOUT.bytes_per_block(4)
    for layer in range(3):
        keys, values = cache.layer(layer)
        assert keys.shape == values.shape == (5, 4, 2, 8)
        assert keys.dtype == torch.bfloat16
        keys.fill_(layer + 1)
        values.fill_(-layer - 1)
    assert [cache.layer(layer)[0].mean().item() for layer in range(3)] == [1, 2, 3]
    assert [cache.layer(layer)[1].mean().item() for layer in range(3)] == [-1, -2, -3]


def test_a_pool_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(FailedPrecondition, match="cannot be allocated") as caught:
        KVCache(LAYOUT, CacheShape(2**50, 16, 1, 64, 64), torch.device("cpu"))
    assert caught.value.field == "num_blocks"
