"""What is chosen from logits, in C: the likeliest, many of them in order, one that is drawn."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.native.library import CutOfC, Library, Pool
from kernels.ops import Cut


class Selection:
    """See kernels.ops.Selection. Logits are float32 on the CPU."""

    def __init__(self, library: Library, pool: Pool) -> None:
        self._calls = library.calls
        self._pool = pool

    def largest(self, x_NV: torch.Tensor) -> tuple[list[int], list[float]]:
        """The first of the largest of each row, and its value."""
        x_NV, rows, shape = _rows(x_NV)
        ids = (ctypes.c_int32 * rows)()
        self._calls.triptych_largest(self._pool.address, x_NV.data_ptr(), rows, *shape, ctypes.addressof(ids))
        places = list(ids)
        at, stride = x_NV.data_ptr(), x_NV.stride(0)
        values = [ctypes.c_float.from_address(at + 4 * (row * stride + id)).value for row, id in enumerate(places)]
        return places, values

    def top(self, x_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and ids of the `count` first of each row."""
        x_NV, rows, shape = _rows(x_NV)
        count = min(count, x_NV.shape[1])
        values_NK, ids_NK = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int32)
        pointers = (ids_NK.data_ptr(), values_NK.data_ptr())
        self._calls.triptych_top(self._pool.address, x_NV.data_ptr(), rows, *shape, count, *pointers)
        return values_NK, ids_NK

    def draw(self, x_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        """A token for each cut."""
        x_NV, _, shape = _rows(x_NV)
        cuts_of_c = (CutOfC * len(cuts))(
            *[CutOfC(cut.key, cut.top_p, cut.min_p, cut.temperature, cut.best, cut.top_k, cut.row) for cut in cuts]
        )
        ids = (ctypes.c_int32 * len(cuts))()
        pointers = (ctypes.addressof(cuts_of_c), ctypes.addressof(ids))
        self._calls.triptych_draw(self._pool.address, x_NV.data_ptr(), *shape, len(cuts), *pointers)
        return list(ids)

    def weigh(self, x_NV: torch.Tensor, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Each row's log of the sum of exponentials, and its token's rank."""
        x_NV, rows, shape = _rows(x_NV)
        ids = (ctypes.c_int32 * rows)(*tokens)
        totals, ranks = (ctypes.c_float * rows)(), (ctypes.c_int32 * rows)()
        pointers = (ctypes.addressof(ids), ctypes.addressof(totals), ctypes.addressof(ranks))
        self._calls.triptych_weigh(self._pool.address, x_NV.data_ptr(), rows, *shape, *pointers)
        return list(totals), list(ranks)


def _rows(x_NV: torch.Tensor) -> tuple[torch.Tensor, int, tuple[int, int]]:
    """The same with columns that follow each other, its rows, and its width and stride."""
    if x_NV.stride(1) != 1:
        x_NV = x_NV.contiguous()
    return x_NV, len(x_NV), (x_NV.shape[1], x_NV.stride(0))
