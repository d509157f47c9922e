"""Graphs of a model: recorded once its cache is there, and the memory that they take.

Where ops have none, nothing is recorded and it takes nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from kernels.ops import Limits
from services.common.errors import FailedPrecondition
from services.common.logs import Log
from services.worker.cache import KVCache
from services.worker.models.decoder import Decoder
from services.worker.step import CacheShape

_log = Log("worker.graphs")


def record(model: Decoder, cache: KVCache, shape: CacheShape) -> None:
    """Records those for this cache, in place of the ones before.

    Raises FailedPrecondition where they do not fit in the device's memory.
    """
    begun = time.monotonic()
    try:
        made = model.warm(_limits(cache, shape))
    except torch.OutOfMemoryError as error:
        model.warm(None)
        raise FailedPrecondition(
            f"the graphs do not fit in the memory beside the KV cache: lower --kv-cache-bytes or the engine's"
            f" --max-num-seqs, or choose --graphs none: {error}",
            field="graphs",
        ) from error
    if made.graphs:
        seconds = round(time.monotonic() - begun, 3)
        _log.info("graphs recorded", graphs=made.graphs, bytes=made.bytes, seconds=seconds)


def planned_bytes(model: Decoder, shape: CacheShape) -> int:
    """What they will take, reckoned from a few that are recorded on a cache of one block."""
    shape = replace(shape, num_blocks=1)
    cache = KVCache(model.kv_layout, shape, model.device)
    return model.warm(replace(_limits(cache, shape), sample=True)).bytes


def _limits(cache: KVCache, shape: CacheShape) -> Limits:
    rows, tokens = shape.max_num_seqs, shape.max_num_batched_tokens
    return Limits(cache.tensor, cache.block_size, rows, tokens, shape.max_model_len)
