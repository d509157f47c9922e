"""Causal attention over a paged cache: the specification, one query at a time.

T queries   H query heads   K key/value heads, H = K * G   D head size   N blocks   P tokens of a block   L keys
"""

from __future__ import annotations

import torch

from kernels.attention.rows import Rows


class Attention:
    """Prepared once per step and window; called once per layer."""

    def __init__(self, rows: Rows, window: int | None) -> None:
        self._rows = rows
        self._window = window

    def __call__(
        self, q_THD: torch.Tensor, k_cache_NPKD: torch.Tensor, v_cache_NPKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """softmax(scale * q k^T) v over keys j of the query's own row with i - window < j <= i. [T, H, D]

        i is the query's position in its row. Head h reads key/value head h // G. Softmax is in float32.
        """
        rows, size = self._rows, self._rows.block_size
        group = q_THD.shape[1] // k_cache_NPKD.shape[2]
        out_THD = torch.empty_like(q_THD)
        for row in range(rows.count):
            start, end = rows.row_starts[row], rows.row_starts[row + 1]
            for token in range(start, end):
                position = rows.context_lens[row] - (end - token)
                first = 0 if self._window is None else max(0, position - self._window + 1)
                places = torch.arange(first, position + 1)
                blocks = rows.block_table_RB[row].cpu()[places // size].long()
                k_KLD = k_cache_NPKD[blocks, places % size].float().transpose(0, 1)
                v_KLD = v_cache_NPKD[blocks, places % size].float().transpose(0, 1)
                q_HD = q_THD[token].float()
                for head in range(q_HD.shape[0]):
                    weights_L = torch.softmax(scale * (k_KLD[head // group] @ q_HD[head]), dim=0)
                    out_THD[token, head] = weights_L @ v_KLD[head // group]
        return out_THD
