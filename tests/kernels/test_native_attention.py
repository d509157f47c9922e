from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.attention import reference
from kernels.attention.rows import Rows
from kernels.kv_write.reference import as_bytes
from kernels.native.build import CHOICES
from kernels.native.library import Library
from tests.kernels.native import HALVES, attend, load, written
from tests.kernels.native import LEVELS as BUILDS
from tests.kernels.paged import Case, make_case
from tests.kernels.test_attention import SPANS, dense_attention


def held(library: Library, case: Case, scale: float) -> Case:
    """The same with keys and values that the build's cache holds without loss, and queries that it multiplies so."""
    for tensor in (case.k_cache, case.v_cache, *(each for pair in case.dense for each in pair)):
        tensor.copy_(tensor.to(library.cache_dtype))
    if library.cache_dtype is torch.bfloat16:
        scale *= math.log2(math.e)
        case.q.copy_((case.q * scale).bfloat16() / scale)
    return case


def assert_close(library: Library, out: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> None:
    """As close as that, or as weights of values let that are rounded to bfloat16, by up to 1 / 256 of them."""
    if library.cache_dtype is torch.bfloat16:
        torch.testing.assert_close(out, expected, atol=8e-3, rtol=4e-3)
        assert (out - expected).square().mean().sqrt() < 3e-3 * expected.square().mean().sqrt()
    else:
        torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


LEVELS = (*BUILDS, HALVES)
ALL_SPANS = [span for spans in SPANS.values() for span in spans]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"),
    [
        (9, 3, 64, 16),
        (4, 4, 32, 32),
        (10, 2, 80, 64),
        (7, 1, 96, 4),
        (16, 1, 128, 16),
        (4, 2, 256, 7),
        (40, 1, 16, 16),
        (8, 2, 48, 64),
        (3, 1, 128, 1),
    ],
)
def test_equals_dense_attention(level, heads, kv_heads, size, block_size, window):
    library = load(level)
    case = make_case(ALL_SPANS, heads=heads, kv_heads=kv_heads, size=size, block_size=block_size)
    out = attend(library, held(library, case, size**-0.5), window, size**-0.5)
    assert_close(library, out, dense_attention(case, window, size**-0.5), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_equals_the_reference(level):
    library = load(level)
    case = held(library, make_case([(20, 1), (3, 5)], heads=6, kv_heads=2, size=32), 0.3)
    expected = reference.Attention(case.rows, 9)(case.q, case.k_cache, case.v_cache, 0.3)
    assert_close(library, attend(library, case, 9, 0.3), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block_size", [4, 16, 32, 64])
def test_keys_that_left_every_window_are_not_read(level, block_size):
    library = load(level)
    case = make_case(
        [(100, 1), (120, 9), (90, 1)], heads=4, kv_heads=2, size=32, block_size=block_size, hidden_before=70
    )
    out = attend(library, held(library, case, 0.3), 20, 0.3)
    assert_close(library, out, dense_attention(case, 20, 0.3), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "window", "block_size", "length"),
    [
        ((9, 3, 64), None, 16, 150),
        ((9, 3, 64), 50, 16, 150),
        ((4, 4, 32), None, 7, 150),
        ((40, 2, 32), 50, 32, 150),
        ((7, 1, 16), 50, 4, 150),
        ((9, 3, 64), None, 64, 600),
        ((8, 1, 32), 300, 24, 600),
        ((7, 7, 48), None, 64, 300),
        ((8, 2, 80), 100, 32, 300),
        ((7, 1, 128), 40, 64, 300),
        ((4, 4, 16), None, 1, 300),
        ((4, 1, 144), 270, 48, 560),
    ],
)
def test_queries_are_bit_equal_however_they_are_cut(shape, window, block_size, length):
    """One row, whole, against the same row cut anywhere, beside strangers; a long one has segments."""
    library = load("auto")
    heads, kv_heads, size = shape
    options = {"heads": heads, "kv_heads": kv_heads, "size": size, "block_size": block_size}
    whole = held(library, make_case([(0, length)], **options), 0.3)
    expected = attend(library, whole, window, 0.3)
    keys, values = whole.dense[0]
    cuts = ((length - 1, 1), (0, 1), (64, 1), (70, 80), (1, 7), (length - 22, 22), (0, length - 1))
    for cut, (before, new) in enumerate(cuts):
        at = cut % 4
        strangers = [(17, 1), (5, 30), (200, 1)]
        spans = [*strangers[:at], (before, new), *strangers[at:]]
        case = held(library, make_case(spans, seed=at + 1, **options), 0.3)
        places = torch.arange(before + new)
        blocks = case.rows.block_table_RB[at, places // block_size].long()
        case.k_cache[blocks, places % block_size] = keys[places]
        case.v_cache[blocks, places % block_size] = values[places]
        start = case.rows.row_starts[at]
        case.q[start : start + new] = whole.q[before : before + new]
        out = attend(library, case, window, 0.3, threads=1 + cut % 3)
        assert torch.equal(out[start : start + new], expected[before : before + new]), (before, new, at)


def share(case: Case, rows: list[int], blocks: int) -> None:
    """The rows begin with the first one's blocks."""
    table, size = case.rows.block_table_RB, case.rows.block_size
    for row in rows[1:]:
        table[row, :blocks] = table[rows[0], :blocks]
        for mine, first in zip(case.dense[row], case.dense[rows[0]], strict=True):
            mine[: blocks * size] = first[: blocks * size]


def alone(case: Case, row: int) -> Case:
    """One row, in the same cache."""
    rows, tokens = case.rows, slice(*case.rows.row_starts[row : row + 2])
    one = Rows((0, rows.new_tokens(row)), rows.context_lens[row : row + 1], rows.block_table_RB[row : row + 1], 0)
    return replace(case, q=case.q[tokens], rows=replace(one, block_size=rows.block_size), dense=[case.dense[row]])


@pytest.mark.parametrize(
    ("level", "shape", "block_size", "window"),
    [
        *((level, (9, 3, 64), 16, None) for level in (*CHOICES[1:], HALVES)),
        ("auto", (9, 3, 64), 64, None),
        ("auto", (2, 2, 32), 24, None),
        ("auto", (8, 1, 16), 64, None),
        ("auto", (7, 1, 32), 8, 100),
    ],
)
def test_rows_that_begin_alike_are_bit_equal_to_each_alone(level, shape, block_size, window):
    """Many rows share a beginning, some of them more of it, one only a part of a segment; others prefill meanwhile."""
    library = load(level)
    heads, kv_heads, size = shape
    spans = [(600, 1), (10, 3), (530, 1), (700, 2), (520, 1), (555, 1), (540, 100), (610, 1), (300, 1)]
    case = make_case(spans, heads=heads, kv_heads=kv_heads, size=size, block_size=block_size)
    case = held(library, case, size**-0.5)
    share(case, [0, 2, 3, 5, 6, 8], 290 // block_size)
    share(case, [3, 0, 5, 2], 528 // block_size)
    share(case, [4, 7], 100 // block_size)
    cache = written(library, case)
    out = attend(library, case, window, size**-0.5, cache=cache)
    assert_close(library, out, dense_attention(case, window, size**-0.5), atol=2e-5, rtol=1e-4)
    for row in range(len(spans)):
        tokens = slice(*case.rows.row_starts[row : row + 2])
        mine = attend(library, alone(case, row), window, size**-0.5, threads=1 + row % 3, cache=cache)
        assert torch.equal(out[tokens], mine), row


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (3, 30), (64, 300)])
def test_a_cache_of_bytes_holds_what_the_reference_says(level, block_size, window):
    library = load(level)
    case = make_case([(300, 1), (70, 9), (3, 40), (299, 1)], heads=6, kv_heads=2, size=48, block_size=block_size)
    for tensor in (case.k_cache, case.v_cache, *(each for pair in case.dense for each in pair)):
        tensor.copy_(as_bytes(tensor))
    cache = written(library, case, torch.int8)
    out = attend(library, case, window, 0.2, cache=cache)
    torch.testing.assert_close(out, dense_attention(case, window, 0.2), atol=5e-5, rtol=1e-4)
    for row in range(4):
        tokens = slice(*case.rows.row_starts[row : row + 2])
        assert torch.equal(out[tokens], attend(library, alone(case, row), window, 0.2, threads=3, cache=cache))
    case.v_cache[case.rows.block_table_RB[1, 75 // block_size], 75 % block_size, 1] = torch.inf
    hit = attend(library, case, window, 0.2, cache=written(library, case, torch.int8)).isnan()
    assert hit[1 + 5 : 1 + 9, 3:].all()  # tokens of row 1 from position 75 on
    assert int(hit.sum()) == 4 * 3 * 48


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block_size", [16, 7, 64])
def test_what_is_not_finite_reaches_only_the_tokens_that_see_it(level, block_size):
    library = load(level)
    case = make_case([(0, 60), (30, 20), (11, 1)], heads=4, kv_heads=2, size=32, block_size=block_size)
    clean = attend(library, held(library, case, 0.3), None, 0.3)
    block = case.rows.block_table_RB[1, 40 // block_size]
    case.v_cache[block, 40 % block_size, 1, 3] = torch.inf
    out = attend(library, case, None, 0.3)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[60 + 10 : 80, 2:, 3] = True  # tokens from position 40 of row 1 on, the group of key head 1
    assert out[hit].isinf().all()
    assert torch.equal(out[~hit], clean[~hit])
    case.q[5] = torch.nan
    out = attend(library, case, None, 0.3)
    assert out[5].isnan().all()
    assert torch.equal(out[:5], clean[:5])
    assert torch.equal(out[6:60], clean[6:60])


@pytest.mark.parametrize("level", LEVELS)
def test_great_scores_do_not_overflow(level):
    library = load(level)
    case = held(library, make_case([(80, 3), (0, 5)], heads=2, kv_heads=2, size=32), 60.0)
    out = attend(library, case, None, 60.0)
    assert_close(library, out, dense_attention(case, None, 60.0), atol=1e-3, rtol=1e-3)
