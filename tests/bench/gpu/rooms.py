"""Every kernel of a forward pass: its inputs, its reference, and what it must move and compute.

T tokens   D hidden size   H heads   K key heads   A head size   F feed-forward size   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels import eager
from kernels.attention.rows import Placed, Rows
from kernels.attention.triton import Attention
from kernels.dispatch import choose_ops
from kernels.int4 import reference as int4_reference
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write.triton import kv_write
from kernels.kv_write.turned import turn_and_write
from kernels.linear import quantized
from kernels.linear import reference as linear_reference
from kernels.moe import reference as moe_reference
from kernels.moe import triton as moe
from kernels.ops import Ops
from kernels.quantized_rows import reference as rows_reference
from kernels.quantized_rows import triton as rows
from kernels.rope import reference as rope_reference
from kernels.rope.triton import rope
from kernels.shapes import Shape
from tests.bench.gpu.case import Case, Given

PAGE = 16
_EPS = 1e-5
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Work:
    """What the cases are made for."""

    shape: Shape
    device: torch.device
    odd: tuple[int, ...]  # tokens that are checked only
    timed: tuple[int, ...]
    products: tuple[int, ...]  # tokens of products
    decode: tuple[int, int]  # rows, context
    long: int  # context of one row
    prefill: int  # tokens
    choose: tuple[int, int]  # rows, vocabulary

    def numbers(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        """Random, of the model's type."""
        return (torch.randn(sizes, device=self.device) * scale).to(self.shape.dtype)

    def whole(self, most: int, *sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Random whole numbers below `most`."""
        return torch.randint(0, most, sizes, device=self.device).to(dtype)


def cases(work: Work) -> Iterator[Case]:
    """All of them."""
    ours = choose_ops("triton", device=str(work.device))
    plain = choose_ops("reference")
    for counts, timed in ((work.odd, False), (work.timed, True)):
        for tokens in counts:
            for make in (norms, turns, activations, quantizing):
                for case in make(work, ours, plain, tokens):
                    case.name, case.timed = f"{case.name}, {tokens}", timed
                    yield case
    for tokens in work.products:
        yield from products(work, tokens)
    yield from experts(work)
    yield from attention(work)


def norms(work: Work, ours: Ops[Any], plain: Ops[Any], tokens: int) -> Iterator[Case]:
    """The norms of rows and of heads."""
    shape = work.shape
    wide, weight = partial(work.numbers, tokens, shape.hidden), partial(work.numbers, shape.hidden)
    size = tokens * shape.hidden * shape.dtype.itemsize
    yield Case("rms_norm", lambda: (wide(), weight(), _EPS), ours.rms_norm, plain.rms_norm, 2 * size)
    yield Case(
        "add_rms_norm", lambda: (wide(), wide(), weight(), _EPS), ours.add_rms_norm, plain.add_rms_norm, 4 * size
    )
    heads = shape.heads + shape.kv_heads
    yield Case(
        "qk_norm",
        lambda: (
            work.numbers(tokens, heads, shape.size),
            work.numbers(shape.size),
            work.numbers(shape.size),
            shape.heads,
            _EPS,
        ),
        ours.qk_norm,
        plain.qk_norm,
        2 * tokens * heads * shape.size * shape.dtype.itemsize,
    )


def turns(work: Work, ours: Ops[Any], plain: Ops[Any], tokens: int) -> Iterator[Case]:
    """Angles, turning, and the write to the cache, with it and alone."""
    shape, item = work.shape, work.shape.dtype.itemsize
    pairs, heads = shape.size // 2, shape.heads + shape.kv_heads
    angles_bytes, new = 2 * tokens * pairs * item, 2 * tokens * shape.kv_heads * shape.size
    blocks = -(-tokens // PAGE) + 2

    def frequencies(*axes: int) -> torch.Tensor:
        return 500_000.0 ** -torch.rand(*axes, pairs, device=work.device)

    def angles() -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = plain.rope_cos_sin(work.whole(8192, tokens), frequencies(), 1.0, shape.dtype)
        return cos, sin

    def slots() -> torch.Tensor:
        found = torch.randperm(blocks * PAGE, device=work.device)[:tokens]
        found[:: max(2, tokens // 3)] = -1
        return found

    def cache(dtype: torch.dtype) -> torch.Tensor:
        return work.numbers(2, blocks, PAGE, shape.kv_heads, shape.size).to(dtype)

    yield Case(
        "angles",
        lambda: (work.whole(131_072, tokens), frequencies(), 1.0, shape.dtype),
        ours.rope_cos_sin,
        plain.rope_cos_sin,
        angles_bytes + 8 * tokens,
    )
    yield Case(
        "angles, three axes",
        lambda: (work.whole(131_072, 3, tokens), frequencies(3), 1.0, shape.dtype),
        ours.rope_axes_cos_sin,
        plain.rope_axes_cos_sin,
        angles_bytes + 24 * tokens,
    )
    yield Case(
        "rope",
        lambda: (work.numbers(tokens, heads, shape.size), *angles()),
        rope,
        rope_reference.rope,
        2 * tokens * heads * shape.size * item + angles_bytes,
    )
    yield Case(
        "kv_write",
        lambda: (*(work.numbers(tokens, shape.kv_heads, shape.size) for _ in range(2)), cache(shape.dtype), slots()),
        _written(kv_write),
        _written(kv_write_reference.kv_write),
        2 * new * item + 8 * tokens,
        tolerance=None,
    )
    for dtype in (shape.dtype, _FP8):
        yield Case(
            f"rope and kv_write, {str(dtype).removeprefix('torch.')}",
            lambda dtype=dtype: (  # type: ignore[misc]
                work.numbers(tokens, heads, shape.size),
                work.numbers(tokens, shape.kv_heads, shape.size),
                angles(),
                cache(dtype),
                slots(),
            ),
            _turned(turn_and_write),
            _turned(eager.turn_and_write(rope_reference.rope, _write_as_stored)),
            2 * tokens * shape.heads * shape.size * item + new * (item + dtype.itemsize) + angles_bytes + 8 * tokens,
            # Near a tie the other order of rounding gives the neighbour, which is 1/8 away in float8.
            tolerance=2e-2 if dtype == _FP8 else 1e-2,
        )


def _written(write: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def run(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        write(keys, values, cache[0], cache[1], slots)
        return cache

    return run


def _turned(write: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def run(qk: Any, values: Any, angles: Any, cache: torch.Tensor, slots: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return write(qk, values, angles, cache, slots), cache

    return run


def _write_as_stored(keys: Any, values: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Any) -> None:
    """The reference's write, of what float8 keeps: 448 at most. Bytes are moved where torch moves no float8."""
    real = slots >= 0
    for x, cache in ((keys, k_cache), (values, v_cache)):
        to, new = cache.view(-1, *cache.shape[2:]), x[real].to(cache.dtype)
        if cache.dtype == _FP8:
            to, new = to.view(torch.uint8), x[real].float().clamp(-448, 448).to(_FP8).view(torch.uint8)
        to[slots[real]] = new


def activations(work: Work, ours: Ops[Any], plain: Ops[Any], tokens: int) -> Iterator[Case]:
    """The gate of the feed-forward."""
    shape = work.shape
    size = tokens * shape.feed_forward * shape.dtype.itemsize
    yield Case(
        "silu_mul", lambda: (work.numbers(tokens, 2 * shape.feed_forward),), ours.silu_mul, plain.silu_mul, 3 * size
    )


def quantizing(work: Work, ours: Ops[Any], plain: Ops[Any], tokens: int) -> Iterator[Case]:
    """Rows to 8 bits, alone and behind norms and the gate."""
    del ours, plain
    shape, item = work.shape, work.shape.dtype.itemsize
    wide, weight = partial(work.numbers, tokens, shape.hidden), partial(work.numbers, shape.hidden)
    size = tokens * shape.hidden
    for kind in _kinds(work):
        parts: tuple[tuple[str, Callable[[], Given], Callable[..., Any], Callable[..., Any], int], ...] = (
            ("quantize_rows", lambda: (wide(),), rows.quantize_rows, rows_reference.quantize_rows, size * (item + 1)),
            (
                "rms_norm and quantize",
                lambda: (wide(), weight(), _EPS),
                rows.rms_norm,
                rows_reference.rms_norm,
                size * (item + 1),
            ),
            (
                "add_rms_norm and quantize",
                lambda: (wide(), wide(), weight(), _EPS),
                rows.add_rms_norm,
                rows_reference.add_rms_norm,
                size * (3 * item + 1),
            ),
            (
                "silu_mul and quantize",
                lambda: (work.numbers(tokens, 2 * shape.feed_forward),),
                rows.silu_mul,
                rows_reference.silu_mul,
                tokens * shape.feed_forward * (2 * item + 1),
            ),
        )
        for name, make, run, reference, moved in parts:
            yield Case(
                f"{name}, {kind}",
                make,
                _meant(partial(run, kind=kind)),
                _meant(partial(reference, kind=kind)),
                moved,
                tolerance=2e-2,
            )


def _meant(run: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """Quantized rows as what they stand for: a number next to the right one is off by little."""

    def meant(*given: Any) -> list[torch.Tensor]:
        found = run(*given)
        parts = [found] if isinstance(found, rows_reference.QuantizedRows) else list(found)
        return [part.dequantize() if isinstance(part, rows_reference.QuantizedRows) else part for part in parts]

    return meant


def _kinds(work: Work) -> tuple[Any, ...]:
    fp8 = work.device.type != "cuda" or torch.cuda.get_device_capability(work.device) >= (8, 9)
    return ("int8", "fp8") if fp8 else ("int8",)


def products(work: Work, tokens: int) -> Iterator[Case]:
    """The product up to the feed-forward size: torch's own of 16 bits, and those of quantized weights."""
    shape = work.shape
    outputs, inputs, item = 2 * shape.feed_forward, shape.hidden, shape.dtype.itemsize
    scale, operations, through = inputs**-0.5, 2 * tokens * outputs * inputs, tokens * (inputs + outputs) * item
    yield Case(
        f"linear, {tokens}",
        lambda: (work.numbers(tokens, inputs), work.numbers(outputs, inputs, scale=scale)),
        torch.nn.functional.linear,
        lambda x, weight: x.float() @ weight.float().T,
        outputs * inputs * item + through,
        operations,
    )
    for kind in _kinds(work):
        yield Case(
            f"linear {kind}, {tokens}",
            lambda kind=kind: (  # type: ignore[misc]
                rows_reference.quantize_rows(work.numbers(tokens, inputs), kind),
                quantized.prepare(work.numbers(outputs, inputs, scale=scale), None, kind),
            ),
            lambda x, linear: linear.multiply(x, shape.dtype),
            lambda x, linear: linear_reference.rows_product(x, linear.weight, None, shape.dtype),
            outputs * inputs + tokens * (inputs + outputs * item),
            operations,
            bits=8,
        )
    yield Case(
        f"linear int4, {tokens}",
        lambda: (
            work.numbers(tokens, inputs),
            quantized.prepare(work.numbers(outputs, inputs, scale=scale), None, "int4"),
        ),
        lambda x, linear: linear(x),
        lambda x, linear: int4_reference.product(x.float(), linear.weight, None),
        # Numbers of 4 bits, a scale and a minimum for each group: as the prepared weight counts them.
        quantized.prepare(work.numbers(outputs, inputs), None, "int4").nbytes + through,
        operations,
    )


def dense_attention(
    rows: Rows, window: int | None, q_THD: torch.Tensor, cache_2NPKD: torch.Tensor, scale: float
) -> torch.Tensor:
    """What kernels.attention.reference says token by token and head by head, some hundred queries at once, in float32.

    At most 2^28 scores exist at a time.
    """
    heads, out = q_THD.shape[1], torch.empty(q_THD.shape, device=q_THD.device)
    for row, context in enumerate(rows.context_lens):
        start, end = rows.row_starts[row], rows.row_starts[row + 1]
        blocks = rows.block_table_RB[row, : -(-context // rows.block_size)].long()
        stored = cache_2NPKD.view(torch.uint8) if cache_2NPKD.element_size() == 1 else cache_2NPKD
        both = stored[:, blocks].view(cache_2NPKD.dtype).flatten(1, 2)[:, :context].float()
        k_LHD, v_LHD = both.repeat_interleave(heads // both.shape[2], dim=2)
        key_L = torch.arange(context, device=q_THD.device)
        step = max(1, 2**28 // (heads * context))
        for first in range(start, end, step):
            last = min(first + step, end)
            query_Q1 = torch.arange(context - (end - first), context - (end - last), device=q_THD.device)[:, None]
            score_HQL = torch.einsum("qhd,lhd->hql", q_THD[first:last].float(), k_LHD) * scale
            seen_QL = (key_L <= query_Q1) & (key_L > query_Q1 - (window or context))
            score_HQL.masked_fill_(~seen_QL, -torch.inf)
            out[first:last] = torch.einsum("hql,lhd->qhd", score_HQL.softmax(-1), v_LHD)
    return out


def experts(work: Work) -> Iterator[Case]:
    """Grouped products of a mixture: 128 experts of which a token has 8, of a quarter of the feed-forward."""
    shape, item = work.shape, work.shape.dtype.itemsize
    count, each = (128, 8) if work.device.type == "cuda" else (5, 2)
    outputs, inputs = max(16, shape.feed_forward // 4), shape.hidden
    for tokens in work.products:

        def given(tokens: int = tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            chosen = torch.rand(tokens, count, device=work.device).topk(each).indices
            pairs = moe_reference.sort_by_expert(chosen, count)
            weight = work.numbers(count, outputs, inputs, scale=inputs**-0.5)
            return work.numbers(tokens, inputs), weight, pairs.offsets_E1, pairs.tokens_X

        # As many experts as tokens choose among 128 by chance.
        touched = count * (1 - (1 - each / count) ** tokens)
        through, operations = tokens * each * (inputs + outputs) * item, 2 * tokens * each * outputs * inputs
        yield Case(
            f"experts, {tokens}",
            given,
            moe.grouped_product,
            moe_reference.grouped_product,
            int(touched * outputs * inputs) * item + through,
            operations,
        )
        for kind in _kinds(work):

            def quantized_rows(given: Any = given, kind: Any = kind) -> Given:
                x, weight, offsets, rows_X = given()
                experts = moe_reference.quantize_experts(weight, kind)
                return rows_reference.quantize_rows(x, kind), experts, offsets, shape.dtype, rows_X

            yield Case(
                f"experts {kind}, {tokens}",
                quantized_rows,
                moe.grouped_rows_product,
                moe_reference.grouped_rows_product,
                int(touched * outputs * inputs) + through,
                operations,
                bits=8,
            )


def attention(work: Work) -> Iterator[Case]:
    """Decode, one long row, prefill, both beside each other, a window, a cache of float8."""
    count, context = work.decode
    new, long = work.prefill, work.long
    decode = [(context - 1, 1)] * count
    mixed = [(context - 1, 1)] * (count // 2) + [(3, new // 4), (context // 2, new // 8)]
    window = max(1, context // 4)
    yield _attend(work, f"attention, decode {count} x {context}", decode, None, work.shape.dtype)
    yield _attend(work, f"attention, decode {count} x {context}, float8", decode, None, _FP8)
    yield _attend(work, f"attention, decode {count} x {context}, window {window}", decode, window, work.shape.dtype)
    yield _attend(work, f"attention, decode 1 x {long}, split", [(long - 1, 1)], None, work.shape.dtype)
    yield _attend(work, f"attention, drafts {count} x 4", [(context - 4, 4)] * count, None, work.shape.dtype)
    yield _attend(work, f"attention, prefill {new}", [(0, new)], None, work.shape.dtype)
    yield _attend(work, "attention, mixed", mixed, None, work.shape.dtype)
    yield _attend(work, "attention, odd rows", [(0, 1), (62, 1), (99, 1), (0, 63), (1, 100)], None, work.shape.dtype)


def _attend(work: Work, name: str, spans: list[tuple[int, int]], window: int | None, stored: torch.dtype) -> Case:
    """Rows given as (tokens before, new tokens)."""
    shape, scale = work.shape, work.shape.size**-0.5
    starts = [0]
    for _, new in spans:
        starts.append(starts[-1] + new)
    contexts = tuple(before + new for before, new in spans)
    wide = -(-max(contexts) // PAGE)
    blocks = sum(-(-context // PAGE) for context in contexts)

    def make() -> Given:
        table = torch.zeros(len(spans), wide, dtype=torch.int32)
        order, taken = torch.randperm(blocks, dtype=torch.int32), 0
        for row, context in enumerate(contexts):
            held = -(-context // PAGE)
            table[row, :held] = order[taken : taken + held]
            taken += held
        tensors = [torch.tensor(each, dtype=torch.int32, device=work.device) for each in (starts, contexts)]
        rows = Rows(tuple(starts), contexts, table.to(work.device), PAGE, Placed(*tensors))
        cache = work.numbers(2, blocks, PAGE, shape.kv_heads, shape.size).to(stored)
        prepared = Attention(rows, window)
        return work.numbers(starts[-1], shape.heads, shape.size), cache, rows, prepared

    def reference(q: torch.Tensor, cache: torch.Tensor, rows: Rows, prepared: Any) -> torch.Tensor:
        del prepared
        return dense_attention(rows, window, q, cache, scale)

    seen = sum(min(context, (window or context) + new - 1) for context, (_, new) in zip(contexts, spans, strict=True))
    pairs = sum(sum(min(before + place + 1, window or before + new) for place in range(new)) for before, new in spans)
    moved = 2 * seen * shape.kv_heads * shape.size * stored.itemsize
    moved += 2 * starts[-1] * shape.heads * shape.size * shape.dtype.itemsize
    return Case(
        name,
        make,
        lambda q, cache, rows, prepared: prepared(q, cache[0], cache[1], scale),
        reference,
        moved,
        4 * pairs * shape.heads * shape.size,
    )
