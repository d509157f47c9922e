from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import batched, chunked, reference
from tests.kernels.paged import Case, make_case

SHAPES = [(4, 4, 8), (6, 2, 24), (7, 1, 16), (9, 3, 64)]
SPANS = {
    "one token": [(0, 1)],
    "whole prompts": [(0, 5), (0, 33), (0, 1)],
    "decode": [(n, 1) for n in (0, 1, 15, 16, 17, 63, 64, 65, 200)],
    "chunks that begin inside": [(7, 9), (16, 16), (100, 31)],
    "mixed": [(40, 1), (0, 20), (3, 1), (70, 140), (64, 2)],
}


def dense_attention(case: Case, window: int | None, scale: float) -> torch.Tensor:
    parts = []
    for row, (keys, values) in enumerate(case.dense):
        q = case.q[case.rows.row_starts[row] : case.rows.row_starts[row + 1]]
        group = q.shape[1] // keys.shape[1]
        query_at = torch.arange(len(keys) - len(q), len(keys))[:, None]
        key_at = torch.arange(len(keys))[None, :]
        seen = (key_at <= query_at) & (key_at > query_at - (window or len(keys) + 1))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.repeat_interleave(group, 1).transpose(0, 1),
            values.repeat_interleave(group, 1).transpose(0, 1),
            attn_mask=seen,
            scale=scale,
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (reference.Attention, SHAPES[1]),  # slow: one query at a time
        *((kind, shape) for kind in (batched.Attention, chunked.Attention) for shape in SHAPES),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
def test_equals_dense_attention(shape, spans, window, kind):
    heads, kv_heads, size = shape
    case = make_case(spans, heads=heads, kv_heads=kv_heads, size=size)
    out = kind(case.rows, window)(case.q, case.k_cache, case.v_cache, 0.3)
    torch.testing.assert_close(out, dense_attention(case, window, 0.3), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [reference.Attention, batched.Attention, chunked.Attention])
def test_keys_that_left_every_window_are_not_read(kind):
    case = make_case([(100, 1), (120, 9), (90, 1)], heads=4, kv_heads=2, size=8, hidden_before=70)
    out = kind(case.rows, 20)(case.q, case.k_cache, case.v_cache, 0.3)
    torch.testing.assert_close(out, dense_attention(case, 20, 0.3), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [batched.Attention, chunked.Attention])
def test_long_rows_and_many_rows(kind):
    spans = [(300, 290), *((13 * n, 1) for n in range(40))]
    case = make_case(spans, heads=4, kv_heads=2, size=16, block_size=8)
    for window in (None, 150):
        out = kind(case.rows, window)(case.q, case.k_cache, case.v_cache, 0.25)
        torch.testing.assert_close(out, dense_attention(case, window, 0.25), atol=2e-5, rtol=1e-4)


def test_padding_of_decode_groups_is_bounded():
    case = make_case([(n, 1) for n in (1, 2, 3, 500, 505, 510, 2000)], heads=2, kv_heads=1, size=8)
    slots = [group.slots_EL.shape for group in batched.Attention(case.rows, None)._groups]
    assert slots == [(3, 4), (3, 511), (1, 2001)]


def test_bfloat16_is_close():
    case = make_case([(40, 1), (0, 20), (70, 150)], heads=4, kv_heads=2, size=32)
    expected = dense_attention(case, None, 0.2)
    q, keys, values = (tensor.bfloat16() for tensor in (case.q, case.k_cache, case.v_cache))
    for kind in (reference.Attention, batched.Attention, chunked.Attention):
        out = kind(case.rows, None)(q, keys, values, 0.2)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("shape", [(4, 4, 8), (7, 1, 16), (9, 3, 64), (20, 1, 24)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_chunked_queries_are_bit_equal_however_they_are_cut(shape, window):
    """One row of 150 tokens, whole, against the same row cut anywhere, beside strangers."""
    heads, kv_heads, size = shape
    whole = make_case([(0, 150)], heads=heads, kv_heads=kv_heads, size=size)
    expected = chunked.Attention(whole.rows, window)(whole.q, whole.k_cache, whole.v_cache, 0.3)
    keys, values = whole.dense[0]
    cuts = ((149, 1), (0, 1), (63, 1), (64, 1), (70, 80), (1, 7), (128, 22), (40, 2))
    for cut, (before, new) in enumerate(cuts):
        strangers = [(17, 1), (5, 30), (200, 1)]
        for at in (cut % 4,):
            spans = [*strangers[:at], (before, new), *strangers[at:]]
            case = make_case(spans, heads=heads, kv_heads=kv_heads, size=size, seed=at + 1)
            places = torch.arange(before + new)
            blocks = case.rows.block_table_RB[at, places // 16].long()
            case.k_cache[blocks, places % 16], case.v_cache[blocks, places % 16] = keys[places], values[places]
            start = case.rows.row_starts[at]
            case.q[start : start + new] = whole.q[before : before + new]
            out = chunked.Attention(case.rows, window)(case.q, case.k_cache, case.v_cache, 0.3)
            assert torch.equal(out[start : start + new], expected[before : before + new]), (before, new, at)
