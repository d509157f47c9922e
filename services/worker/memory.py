"""The memory sum: what weights, process, the largest step and the KV cache take, and whether it works out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from services.common.errors import FailedPrecondition
from services.worker.step import CacheShape, MemoryPlan

_ARENA_MAX = -8  # M_ARENA_MAX of glibc's mallopt


def plan_memory(
    shape: CacheShape,
    bytes_per_token: int,
    *,
    weight_bytes: int,
    step_bytes: int,
    kv_cache_bytes: int,
    process_bytes: int = 0,
    windows: Sequence[int | None] = (None,),
) -> MemoryPlan:
    """How many blocks `kv_cache_bytes` hold. Raises FailedPrecondition where one request cannot fit.

    `windows` are those of the KV groups, which share the blocks; `bytes_per_token` is that of one of them.
    """
    bytes_per_block = bytes_per_token * shape.block_size
    num_blocks = max(0, kv_cache_bytes) // bytes_per_block
    needed = sum(_most_blocks(shape, window) for window in windows)
    total = human(weight_bytes + process_bytes + step_bytes + kv_cache_bytes)
    summary = (
        f"weights {human(weight_bytes)} + process {human(process_bytes)} + largest step {human(step_bytes)}"
        f" + KV cache {human(kv_cache_bytes)} = {total}; the cache holds {num_blocks} blocks of"
        f" {shape.block_size} tokens, {human(bytes_per_block)} each: {num_blocks * shape.block_size} tokens"
    )
    if num_blocks < 1:
        raise FailedPrecondition(
            f"not even one KV block fits: {summary}. Raise --kv-cache-bytes or --kv-cache-fraction,"
            f" or lower the engine's --max-num-batched-tokens",
            field="kv_cache_bytes",
        )
    if num_blocks < needed:
        raise FailedPrecondition(
            f"a request of max_model_len = {shape.max_model_len} tokens needs {needed} blocks: {summary}."
            f" Lower the engine's --max-model-len to {num_blocks * shape.block_size} or raise --kv-cache-bytes",
            field="max_model_len",
        )
    return MemoryPlan(
        weight_bytes, process_bytes, step_bytes, num_blocks * bytes_per_block, bytes_per_block, num_blocks, summary
    )


def _most_blocks(shape: CacheShape, window: int | None) -> int:
    """Blocks that one request holds in a group, at most: a step's own tokens, and the window before them."""
    whole = -(-shape.max_model_len // shape.block_size)
    if window is None:
        return whole
    # Wherever the first of these tokens lies in its block, one more block holds the rest.
    return min(whole, -(-(window - 1 + shape.max_num_batched_tokens) // shape.block_size) + 1)


def human(size: int) -> str:
    """Bytes as a person reads them: 1.50 GiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def available_bytes() -> int:
    """Memory that this process may still take: what the machine has free, within its control group."""
    free = _field("/proc/meminfo", "MemAvailable")
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def give_back() -> None:
    """Gives memory that was freed back to the system, as far as the C library can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def share_one_heap() -> None:
    """All threads allocate from one heap from now on: the C library gives back nothing of the others' tops."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the process's resident memory grows, at most, while `work` runs."""
    give_back()  # what was freed but not given back would hide some of the growth
    with suppress(OSError):  # and so would the peak of an earlier moment
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident_bytes()
    work()
    return max(0, _status("VmHWM") - before)


def resident_bytes() -> int:
    """What this process takes now."""
    return _status("VmRSS")


def _status(name: str) -> int:
    return _field("/proc/self/status", name)


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise FailedPrecondition(f"{path} has no {name}")


def _cgroup(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
