"""Which graph a batch takes, and how graphs are recorded where there is no GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kernels.attention.rows import Rows
from kernels.dispatch import choose_ops
from kernels.graphs.capture import Rerun, capture_of
from kernels.graphs.dispatch import Batch, Choice, Dispatcher, Mode, sizes
from kernels.graphs.graphed import GraphOptions, Graphs, with_graphs
from kernels.graphs.reference import fill
from kernels.native.build import Unavailable
from kernels.ops import Limits, StepTensors
from kernels.piecewise.ops import piecewise_ops
from tests.kernels.recorded import Recorded
from tests.kernels.test_piecewise import given, small_model

FULL, PIECEWISE, NONE = Mode.FULL, Mode.PIECEWISE, Mode.NONE


@pytest.mark.parametrize(
    ("most", "table"),
    [
        (0, ()),
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (300, (1, 2, 4, *range(8, 257, 8), 272, 288, 300)),
    ],
)
def test_sizes(most, table):
    assert sizes(most) == table


@pytest.mark.parametrize(
    ("batch", "choice"),
    [
        # decode: one token in each row
        (Batch(1, 1, 1), Choice(FULL, 1, 1, 1)),
        (Batch(3, 3, 1), Choice(FULL, 4, 4, 1)),
        (Batch(65, 65, 1), Choice(FULL, 72, 72, 1)),
        (Batch(200, 200, 1), Choice(FULL, 200, 200, 1)),
        (Batch(201, 201, 1), Choice(PIECEWISE, 208, 0, 0)),  # more rows than there are
        # drafts: up to five tokens in a row, whatever each has
        (Batch(2, 1, 2), Choice(FULL, 5, 1, 5)),
        (Batch(15, 3, 5), Choice(FULL, 20, 4, 5)),
        (Batch(16, 12, 4), Choice(FULL, 80, 16, 5)),
        (Batch(60, 30, 5), Choice(PIECEWISE, 64, 0, 0)),  # 160 would be too many
        (Batch(100, 30, 5), Choice(FULL, 160, 32, 5)),
        # mixed
        (Batch(6, 1, 6), Choice(PIECEWISE, 8, 0, 0)),
        (Batch(512, 3, 500), Choice(PIECEWISE, 512, 0, 0)),
        (Batch(513, 3, 500), Choice(NONE, 513, 3, 500)),
        # media
        (Batch(4, 4, 1, plain=False), Choice(NONE, 4, 4, 1)),
    ],
)
def test_a_batch_takes_the_smallest_graph_that_holds_it(batch, choice):
    assert Dispatcher(rows=200, tokens=4096, drafts=4, pieces=True).choose(batch) == choice


def test_without_pieces_mixed_batches_run_as_they_are():
    dispatcher = Dispatcher(rows=200, tokens=4096, drafts=4)
    assert dispatcher.choose(Batch(6, 1, 6)).mode is NONE
    assert dispatcher.choose(Batch(201, 201, 1)).mode is NONE
    assert Dispatcher(rows=200, tokens=4096, full=False, pieces=True).choose(Batch(3, 3, 1)).mode is PIECEWISE


def test_every_choice_is_one_of_those_that_are_recorded_and_holds_its_batch():
    rng = random.Random(3)
    for _ in range(300):
        rows, tokens, drafts = rng.randint(1, 300), rng.randint(1, 600), rng.choice([0, 0, 2, 4, 600])
        dispatcher = Dispatcher(rows=rows, tokens=tokens, drafts=drafts, pieces=rng.random() < 0.5)
        recorded = set(dispatcher.choices())
        for _ in range(10):
            counts = [rng.choice([1, 1, 1, 2, 5, 40]) for _ in range(rng.randint(1, rows))]
            batch = Batch(sum(counts), len(counts), max(counts))
            choice = dispatcher.choose(batch)
            if choice.mode is NONE:
                assert choice[1:] == batch[:3]
                continue
            assert choice in recorded
            assert choice.tokens >= batch.tokens
            assert choice.tokens <= max(2 * batch.tokens, 128)
            if choice.mode is FULL:
                assert choice.rows >= batch.rows
                assert choice.per_row >= batch.per_row
                assert choice.tokens == choice.rows * choice.per_row


def test_pieces_are_recorded_first_and_the_largest_first():
    choices = list(Dispatcher(rows=16, tokens=64, drafts=1, pieces=True).choices())
    assert [choice.tokens for choice in choices if choice.mode is PIECEWISE] == [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]
    assert [choice.tokens for choice in choices if choice.mode is FULL] == [32, 16, 16, 8, 8, 4, 4, 2, 2, 1]
    assert [choice.mode for choice in choices] == [PIECEWISE] * 11 + [FULL] * 10
    assert len(set(choices)) == len(choices)


def test_where_there_is_no_gpu_a_replay_runs_again_on_the_same_memory():
    capture = capture_of(torch.device("cpu"))
    assert isinstance(capture, Rerun)
    x, y = torch.ones(2), torch.zeros(2)
    with capture.session():
        graph, (made,) = capture.record(lambda: (y.copy_(x * 3) + 1,))
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [15, 15]
    assert made.tolist() == [16, 16]
    assert capture.borrowed(made) is made


def test_graphs_are_refused_by_name():
    ops, cpu = choose_ops("reference"), torch.device("cpu")
    with pytest.raises(ValueError, match="graphs must be one of auto, none, full, piecewise, both, not 'half'"):
        with_graphs(ops, GraphOptions("half"), cpu)
    with pytest.raises(Unavailable, match="graphs are of Triton kernels, and here are reference ones"):
        with_graphs(ops, GraphOptions("full"), cpu)
    assert with_graphs(ops, GraphOptions("auto"), cpu) is ops
    assert with_graphs(ops, GraphOptions("none"), cpu) is ops


def two_rows(first: int, second: int) -> StepTensors:
    """A step of two rows that begin."""
    step = given(first + second)
    table = torch.tensor([[3, 1, 0], [2, 4, 5]], dtype=torch.int32)
    slots = [table[row, at // 4].item() * 4 + at % 4 for row, count in ((0, first), (1, second)) for at in range(count)]
    rows = Rows((0, first, first + second), (first, second), table, 4)
    positions = torch.tensor([*range(first), *range(second)])
    return replace(step, positions_T=positions, slots_T=torch.tensor(slots), rows=rows)


@pytest.mark.parametrize("media", [False, True])
@torch.inference_mode()
def test_graphs_of_pieces_give_what_the_pass_gives(media):
    """Attention is the reference's, which reads its rows on the host; layers are more than there are places."""
    capture = Recorded()
    base = replace(choose_ops("reference"), largest=lambda x: torch.stack((x.argmax(1).float(), x.amax(1)), 1))
    graphs = Graphs(capture, fill, full=False)
    ops = piecewise_ops(base, hooks=graphs.pieces.hooks)
    ours = graphs.over(ops).compile(small_model(ops, media=media))
    theirs = base.compile(small_model(base, media=media))
    cache = torch.full_like(given(24).cache, torch.nan)
    made = ours.warm(Limits(cache, 4, rows=4, tokens=9, context=64))
    assert made.graphs == 5  # 9, 8, 4, 2 and 1 tokens, each of so many pieces
    assert len(capture.graphs) == 5 * (7 if media else 5)
    assert torch.isnan(cache).all()
    for first, second in ((1, 1), (5, 1), (1, 2), (4, 5), (6, 3), (5, 5)):
        replays = capture.replays
        step = replace(two_rows(first, second), cache=cache)
        expected = theirs(replace(step, cache=torch.full_like(cache, torch.nan)))
        torch.testing.assert_close(ours(step), expected, rtol=1e-5, atol=1e-5)
        assert capture.replays - replays == (len(capture.graphs) // 5 if first + second < 10 else 0)
    if media:  # a step that reads media runs as it is
        replays = capture.replays
        torch.testing.assert_close(ours(replace(given(6, media), cache=cache)), theirs(given(6, media)))
        assert capture.replays == replays
    ours.warm(None)
    assert not any(wrapped.graphs for wrapped in graphs.pieces._wrapped)
    del ours
    assert not graphs.pieces.exist  # what holds weights went with the pass
