from __future__ import annotations

import re
import sys
import weakref
from pathlib import Path

import pytest
import torch

from services.common.errors import FailedPrecondition
from services.worker.cache import KVCache, KvLayout, _populate
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


def resident(tensor: torch.Tensor) -> int:
    """Bytes of its mapping that have pages."""
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
        begin, end = (int(word, 16) for word in text.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            found = re.search(r"^Rss: +([0-9]+) kB", text, re.M)
            assert found
            return 1024 * int(found[1])
    raise AssertionError("it lies nowhere")


def test_pages_are_made_ahead_and_keep_what_is_written():
    cache = KVCache(LAYOUT, CacheShape(60_000, 16, 2, 64, 64), torch.device("cpu"))
    assert cache.nbytes > 90e6
    assert resident(cache.tensor) < 1e6
    cache.tensor[1, 0, 0] = 7
    thread = cache.make_pages()
    assert thread
    thread.join(60)
    assert not thread.is_alive()
    if resident(cache.tensor) < 5e6:
        pytest.skip("this system makes no pages ahead")
    assert resident(cache.tensor) >= cache.nbytes
    assert cache.tensor[1, 0, 0].eq(7).all()
    assert cache.tensor.sum() == 7 * 16 * 2 * 8


def test_a_cache_is_let_go_while_its_pages_are_made():
    cache = KVCache(LAYOUT, CacheShape(60_000, 16, 2, 64, 64), torch.device("cpu"))
    holders = [sys.getrefcount(cache)]

    def ask() -> KVCache | None:
        holders.append(sys.getrefcount(cache))
        return cache if len(holders) <= 5 else None

    _populate(ask, [layer.data_ptr() for layer in cache.tensor], cache.nbytes // 3)
    assert set(holders) == {holders[0]}
    assert resident(cache.tensor) < 20e6


def test_who_makes_pages_keeps_no_cache():
    made = [KVCache(LAYOUT, CacheShape(60_000, 16, 2, 64, 64), torch.device("cpu"))]
    thread, gone = made[0].make_pages(), weakref.ref(made[0])
    made.clear()
    assert thread
    thread.join(60)
    assert gone() is None
