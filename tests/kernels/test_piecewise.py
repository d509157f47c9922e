"""A pass as pieces: what is recorded, where it is split, and that pieces give what the table of tensors gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention.rows import Rows
from kernels.dispatch import choose_ops
from kernels.ops import Attention, MediaTensors, Ops, Step, StepTensors
from kernels.piecewise.ops import piecewise_ops, record
from kernels.piecewise.pieces import Barrier, Piece, distinct, split
from kernels.piecewise.running import Hooks, uncompiled

HEADS, KV, HEAD, HIDDEN, FEED, VOCAB, LAYERS = 4, 2, 8, 24, 20, 37, 4
Mathematics = Callable[[Step[Any]], Any]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def small_model(ops: Ops[Any], layers: int = LAYERS, media: bool = False) -> Mathematics:
    """A decoder of a few lines over a table of ops."""
    table = ops.prepare_embedding(random(VOCAB, HIDDEN), None)
    width = (HEADS + 2 * KV) * HEAD
    qkv = [ops.prepare_linear(random(width, HIDDEN, seed=layer) * 0.3, random(width)) for layer in range(layers)]
    out = [ops.prepare_linear(random(HIDDEN, HEADS * HEAD, seed=layer) * 0.3, None) for layer in range(layers)]
    up = [ops.prepare_linear(random(2 * FEED, HIDDEN, seed=layer) * 0.3, None) for layer in range(layers)]
    down = [ops.prepare_linear(random(HIDDEN, FEED, seed=layer) * 0.3, None) for layer in range(layers)]
    head = ops.prepare_linear(random(VOCAB, HIDDEN), None)
    norms = [random(HIDDEN, seed=layer) for layer in range(2 * layers + 1)]
    frequencies = random(3, HEAD // 2) if media else random(HEAD // 2)

    def mathematics(step: Step[Any]) -> Any:
        if media:
            angles = ops.rope_axes_cos_sin(step.positions_3T, frequencies, 1.0, torch.float32)
        else:
            angles = ops.rope_cos_sin(step.positions_T, frequencies, 1.0, torch.float32)
        residual = ops.embedding(step.ids_T, table)
        if media:
            residual = ops.replace_rows(residual, step.media, 0)
        x = ops.rms_norm(residual, norms[0], 1e-5)
        for layer in range(layers):
            qk, v = ops.split_heads(qkv[layer](x), (HEADS + KV, KV), HEAD)
            qk = ops.qk_norm(qk, norms[0][:HEAD], norms[1][:HEAD], HEADS, 1e-5)
            x = step.attend(Attention(layer, HEADS, None, 0.3), qk, v, *angles)
            x, residual = ops.add_rms_norm(out[layer](x), residual, norms[2 * layer + 1], 1e-5)
            x = down[layer](ops.silu_mul(up[layer](x)))
            if media and layer == 0:
                x = ops.add_rows(x, step.media, 1)
            x, residual = ops.add_rms_norm(x, residual, norms[2 * layer + 2], 1e-5)
        return ops.largest(head(x))

    return mathematics


def given(tokens: int, media: bool = False, seed: int = 0) -> StepTensors:
    """One row of so many tokens, whose keys lie in scattered blocks of 4."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // 4)
    table = torch.randperm(blocks, generator=generator)
    slots = table.repeat_interleave(4)[:tokens] * 4 + torch.arange(tokens) % 4
    read = None
    if media:
        places = torch.arange(0, tokens, 2)
        read = MediaTensors(torch.arange(3 * tokens).view(3, tokens), places, random(len(places), 2, HIDDEN))
    return StepTensors(
        torch.randint(VOCAB, (tokens,), generator=generator),
        torch.arange(tokens),
        slots,
        Rows((0, tokens), (tokens,), table[None].int(), 4),
        torch.full((LAYERS, 2, blocks, 4, KV, HEAD), torch.nan),
        read,
    )


def base(name: str = "reference") -> Ops[torch.Tensor]:
    return choose_ops(name)


def recorded(layers: int = LAYERS, media: bool = False) -> tuple[Piece | Barrier, ...]:
    return split(record(small_model(piecewise_ops(base()), layers, media)))


def test_layers_are_one_piece_more_of_which_three_differ():
    parts = recorded()
    assert [type(part).__name__ for part in parts] == ["Piece", "Barrier"] * LAYERS + ["Piece"]
    keys = [part.key for part in parts if isinstance(part, Piece)]
    assert len(set(keys)) == 3
    assert len(set(keys[1:-1])) == 1
    assert list(distinct(parts)) == [keys[0], keys[1], keys[-1]]


def test_media_are_read_between_pieces():
    barriers = [part.node.op for part in recorded(media=True) if isinstance(part, Barrier)]
    assert barriers == ["replace_rows", "attend", "add_rows", *["attend"] * (LAYERS - 1)]


def test_what_a_piece_says_names_its_arguments_by_kind_and_its_values_by_place():
    last = recorded()[-1]
    assert isinstance(last, Piece)
    assert last.text.splitlines() == [
        "a0: float32 [T, 32]",
        "a1: float32 [T, 24]",
        "v0 = linear(a0, float32 [24, 32])",
        "v1, v2 = add_rms_norm(v0, a1, float32 [24], 1e-05)",
        "v3 = linear(v1, float32 [40, 24])",
        "v4 = silu_mul(v3)",
        "v5 = linear(v4, float32 [24, 20])",
        "v6, v7 = add_rms_norm(v5, v2, float32 [24], 1e-05)",
        "v8 = linear(v6, float32 [37, 24])",
        "v9 = largest(v8)",
        "return v9",
    ]
    assert [tuple(weight.shape) for weight in last.weights] == [(24, 32), (24,), (40, 24), (24, 20), (24,), (37, 24)]


def test_a_value_is_let_go_where_it_is_read_last():
    parts = recorded(2)
    released = [len(part.released) for part in parts]
    # ids and positions; queries, keys, values; x and the residual; the same, and cos and sin with the last
    assert released == [2, 2, 2, 4, 2]


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_pieces_give_what_the_table_gives(name: str, media: bool, tokens: int):
    ops = base(name)
    expected, found = given(tokens, media), given(tokens, media)
    eager = ops.compile(small_model(ops, media=media))
    pieces = piecewise_ops(ops).compile(small_model(piecewise_ops(ops), media=media))
    assert torch.equal(eager(expected).view(torch.int32), pieces(found).view(torch.int32))
    assert torch.equal(expected.cache.nan_to_num(9), found.cache.nan_to_num(9))
    assert pieces.listing


def test_pieces_are_wrapped_and_what_stands_between_them_is_placed():
    wrapped: list[str] = []
    memory: list[torch.Tensor] = []

    def wrap(piece: Piece, run: Any) -> Any:
        wrapped.append(piece.key)
        return run

    def place(made: torch.Tensor) -> torch.Tensor:
        memory.append(made.clone())
        made.fill_(torch.nan)  # whoever reads where it was, reads this
        return memory[-1]

    ops = piecewise_ops(base(), Hooks(wrap, place))
    made = ops.compile(small_model(ops))(given(5))
    assert len(wrapped) == LAYERS + 1
    assert [tuple(one.shape) for one in memory] == [(5, HEADS * HEAD)] * LAYERS
    assert torch.equal(made, base().compile(small_model(base()))(given(5)))


@pytest.mark.parametrize("media", [False, True])
def test_compiled_pieces_are_given_inputs_without_gaps(media: bool):
    """Such as positions on three axes that a step of text has once."""
    ops = base()

    def compiler(piece: Piece) -> Any:
        run = uncompiled(piece, ops)

        def compiled(*arguments: torch.Tensor) -> Any:
            assert all(one.is_contiguous() for one in arguments)
            return run(*arguments)

        return compiled

    made = piecewise_ops(ops, None, compiler).compile(small_model(piecewise_ops(ops), media=True))
    assert torch.equal(made(given(5, media)), ops.compile(small_model(ops, media=True))(given(5, media)))


def test_mathematics_of_rows_are_one_piece_by_the_ops_of_the_base():
    plain = base()
    ops = piecewise_ops(plain)
    weight, x = random(5, 3), random(2, 3)
    head = ops.prepare_linear(weight, None)
    assert torch.equal(ops.compile_rows(head, 3)(x), x @ weight.T)
    assert torch.equal(ops.compile_rows(lambda x: ops.largest(head(x)), 3)(x), plain.largest(x @ weight.T))
    with pytest.raises(ValueError, match="only one piece"):
        ops.compile_rows(lambda x: x, 3)
