"""Graphs of a tiny model through Triton's interpreter: what a replay gives is what the pass gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention.rows import Placed, Rows
from kernels.graphs.graphed import Graphed, Graphs
from kernels.graphs.reference import Columns
from kernels.graphs.reference import fill as fill_of_reference
from kernels.graphs.triton import fill
from kernels.ops import Limits, StepTensors, Warmed
from services.worker.config import WorkerSettings
from services.worker.loading import load_model
from services.worker.models.decoder import Decoder
from services.worker.runner import TorchRunner
from tests.kernels.recorded import Recorded
from tests.worker.columns import SHAPE
from tests.worker.flat import BLOCK_SIZE, Sequences
from tests.worker.interpreted.models import SAMPLED, tokens_of
from tests.worker.tiny_llama import runner_of, tiny_llama


def graphed(path: str, *, drafts: int, layers: int) -> tuple[Decoder, Decoder, Recorded]:
    """The model with graphs, and without."""
    loaded, _ = load_model(path, ops="triton", dtype="float32")
    config = replace(loaded.config, windows=loaded.config.windows[:layers])
    weights = replace(loaded._weights, layers=loaded._weights.layers[:layers])
    capture = Recorded()
    ops = Graphs(capture, fill, drafts=drafts).over(loaded.ops)
    return Decoder(config, weights, ops), Decoder(config, weights, loaded.ops), capture


def columns(tokens: int, rows: int, blocks: int) -> Columns:
    whole = [torch.randint(1, 1000, (tokens,)) for _ in range(3)]
    starts = torch.randint(0, tokens + 1, (rows + 1,), dtype=torch.int32)
    return Columns(
        *whole, starts, *(torch.randint(1, 99, size, dtype=torch.int32) for size in ((rows,), (rows, blocks)))
    )


@pytest.mark.parametrize(
    ("tokens", "rows", "per_row", "all_rows"), [(0, 0, 1, 1), (63, 63, 1, 64), (7, 4, 5, 5), (300, 100, 3, 100)]
)
def test_what_is_copied_is_padded_as_the_specification_says(tokens, rows, per_row, all_rows):
    given, to = columns(tokens, rows, 7), columns(all_rows * per_row, all_rows, 1030)
    expected = Columns(*(column.clone() for column in to))
    given.contexts_R.clamp_(max=7 * 16)
    fill_of_reference(given, expected, per_row, 16)
    fill(given, to, per_row, 16)
    for found, wanted in zip(to, expected, strict=True):
        assert torch.equal(found, wanted)
    assert (to.slots_T[tokens:] == -1).all()
    assert not to.contexts_R[rows:].any()


def test_a_step_that_is_larger_than_its_graph_is_an_error():
    with pytest.raises(ValueError, match="a step of 9 tokens and 3 rows does not fit in a graph of 8 and 8"):
        fill(columns(9, 3, 2), columns(8, 8, 2), 1, 16)


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "tokens", "layers"), [(4, 4, 1), pytest.param(5, 10, 2, marks=pytest.mark.slow)])
def test_every_size_of_batch_gives_what_the_pass_gives(rows, tokens, layers, tmp_path):
    """Rows that decode, with drafts and without, beside padding; and a step that no graph holds."""
    model, plain, capture = graphed(str(tiny_llama(tmp_path / "tiny")), drafts=1, layers=layers)
    numbers = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 256, (40,), generator=numbers).tolist() for _ in range(rows)]
    ours, theirs = Sequences(model, sequences), Sequences(plain, sequences)
    limits = Limits(ours.cache.tensor, BLOCK_SIZE, rows, tokens, context=64)
    made = model.warm(limits) if layers > 1 else model._forward.warm(limits)
    # Of 1, 2 and 4 rows, and with a draft of 1 and 2; or of 1, 2, 4 and 5 rows, with and without, for two passes.
    assert made.graphs == len(capture.graphs) == {4: 5, 5: 16}[rows]
    without = [(row, 3 + row) for row in range(rows)]
    counts = (1, 3) if layers == 1 else range(1, rows + 1)
    within = [*([(row, 1) for row in range(count)] for count in counts), [(1, 2), (0, 1)]]
    for pieces in (without, *within):
        replays = capture.replays
        for run in (ours, theirs):
            run.step(pieces)
        assert capture.replays - replays == (pieces in within)
    for row in range(rows):
        torch.testing.assert_close(ours.all_logits(row), theirs.all_logits(row), atol=1e-4, rtol=0)
    if layers > 1:
        assert model.likeliest(ours.batch, ours.cache)[0] == plain.likeliest(theirs.batch, theirs.cache)[0]
        assert capture.replays == replays + 2
    model.warm(None)
    assert model._forward._graphs == {}


class Program:
    """A pass that is one op, and no Triton: token id + 1000 * the context of its row."""

    listing = ""

    def warm(self, limits):
        return Warmed(0, 0)

    def __call__(self, given):
        placed = given.rows.placed
        assert placed is not None
        row_of_T = torch.searchsorted(placed.starts_R1[1:], torch.arange(len(given.ids_T)), right=True)
        return (given.ids_T + 1000 * placed.contexts_R[row_of_T.clamp(max=len(placed.contexts_R) - 1)])[:, None]


@torch.inference_mode()
def test_rows_that_are_placed_are_read_where_they_lie():
    cache = torch.zeros(1)
    limits = Limits(cache, 16, rows=8, tokens=8, context=64)
    run = Graphed(Program(), Graphs(Recorded(), fill))
    run.warm(limits)
    starts, contexts = torch.arange(6, dtype=torch.int32), torch.tensor([5, 9, 2, 31, 64], dtype=torch.int32)
    table = torch.zeros(5, 2, dtype=torch.int32)
    ids, zeros = torch.arange(20, 25), torch.zeros(5, dtype=torch.int64)
    # The tuple of contexts says how long they may be.
    rows = Rows((0, 1, 2, 3, 4, 5), (64,) * 5, table, 16, Placed(starts, contexts))
    found = run(StepTensors(ids, zeros, zeros, rows, cache))
    assert found[:, 0].tolist() == [5020, 9021, 2022, 31023, 64024]
    other = StepTensors(ids, zeros, zeros, rows, torch.zeros(1))
    assert torch.equal(run(other), found)  # another cache: as it is, without a graph
    assert run(other).data_ptr() != found.data_ptr() == run(StepTensors(ids, zeros, zeros, rows, cache)).data_ptr()


class Keeping(Program):
    """A pass that takes again what it made of placed rows, as attention does: token id + its place."""

    def __call__(self, given):
        made = given.rows.placed.made
        if not made:
            made["places"] = torch.arange(len(given.ids_T))
        return (given.ids_T + made["places"])[:, None]


@torch.inference_mode()
def test_what_was_made_of_placed_rows_lives_as_long_as_the_graph():
    cache, zeros = torch.zeros(1), torch.zeros(2, dtype=torch.int64)
    run = Graphed(Keeping(), Graphs(Recorded(), fill))
    run.warm(Limits(cache, 16, rows=2, tokens=2, context=64))
    rows = Rows((0, 1, 2), (1, 1), torch.zeros(2, 1, dtype=torch.int32), 16)
    assert run(StepTensors(torch.tensor([7, 7]), zeros, zeros, rows, cache))[:, 0].tolist() == [7, 8]


def test_bytes_are_reckoned_from_a_few_of_them_and_measured_where_all_are_recorded():
    limits = Limits(torch.zeros(1), 16, rows=64, tokens=64, context=64)
    shared = Graphs(Recorded(), fill)
    run = Graphed(Program(), shared)
    sampled = run.warm(replace(limits, sample=True))
    assert len(shared.capture.graphs) == 4
    assert run._graphs == {}
    whole = run.warm(limits)
    assert sampled.graphs == whole.graphs == 11  # 1, 2, 4, 8, 16 .. 64
    assert sampled.bytes == whole.bytes == 11 * len(shared.capture.graphs[-1])
    assert shared.capture.pools == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"graphs": "full", "graph_drafts": 1},
        {"graphs": "piecewise"},
        {"graphs": "both", "graph_drafts": 0, "deterministic": True},
        {"graphs": "both", "graph_drafts": 0, "quantize": "int8"},
    ],
)
def test_a_runner_with_graphs_gives_the_tokens_without(tmp_path, settings):
    path = str(tiny_llama(tmp_path / "tiny"))
    settings = {"ops": "triton", "deterministic": False, **settings}
    shape = replace(SHAPE, max_num_seqs=2, max_num_batched_tokens=9)
    expected = tokens_of(runner_of(path, **{**settings, "graphs": "none"}), **SAMPLED)
    runner = TorchRunner(WorkerSettings.build(threads=1, **settings))
    runner.load(path, None)
    assert runner.plan_memory(shape, 1 << 20).step_bytes > 0
    runner.init_cache(shape)
    assert tokens_of(runner, **SAMPLED) == expected
    runner.sleep(1)
    assert not any(run._graphs for run in (runner._model._forward, runner._model._likeliest))
    runner.init_cache(shape)
    assert tokens_of(runner, **SAMPLED) == expected
