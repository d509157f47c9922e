"""Pooled vectors of tiny models with random weights, against the hidden states that transformers gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.runner import TorchRunner
from services.worker.step import POOLS, ROW_FAILED, ROW_NOT_FINITE, ROW_OK, SAMPLES, NewRow, Pooled, StepOutput
from tests.worker.columns import request, run, step
from tests.worker.tiny import make, save
from tests.worker.tiny_llama import runner_of

PROMPT = [11, 20, 34, 5, 90, 90, 17, 3, 50, 42, 8]
POOLINGS = ("mean", "last")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    oracle = make(request.param)
    return oracle, save(oracle, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def oracle(model: tuple[Any, Path]) -> Any:
    return model[0]


@pytest.fixture
def runner(model: tuple[Any, Path]) -> TorchRunner:
    return runner_of(str(model[1]))


@torch.inference_mode()
def expected(oracle: Any, ids: Sequence[int], pooling: str) -> list[float]:
    """transformers' last_hidden_state, pooled and normalised."""
    hidden_TD = oracle.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double()
    pooled_D = hidden_TD.mean(0) if pooling == "mean" else hidden_TD[-1]
    values: list[float] = (pooled_D / pooled_D.norm()).tolist()
    return values


def pooling_request(row: int, ids: Sequence[int], pooling: str | None, epoch: int = 1) -> NewRow:
    return replace(request(row, ids, epoch=epoch), pooling=pooling)


def vector_of(output: StepOutput, row: int = 0) -> tuple[float, ...]:
    """The vector of a row, and nothing else of it."""
    (result,) = (result for result in output.results if result.row == row)
    assert (result.status, result.token_ids) == (ROW_OK, ())
    (pooled,) = (pooled for pooled in output.pooled if pooled.row == row)
    assert pooled.epoch == result.epoch
    return pooled.values


def pool(runner: TorchRunner, new: NewRow, chunk: int = 64) -> tuple[float, ...]:
    """The vector of one request alone, its prompt in chunks."""
    known = len(new.tokens)
    for start in range(0, known, chunk):
        size = min(chunk, known - start)
        last = start + size == known
        given = step(start, [(new.row, start, size)], [] if start else [new], flags=[POOLS if last else 0])
        output = run(runner, given)
        assert last or (output.results, output.pooled) == ((), ())
    return vector_of(output, new.row)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_it_is_the_oracles_and_of_length_1(oracle: Any, runner: TorchRunner, pooling: str) -> None:
    for ids in (PROMPT, PROMPT[:1]):
        vector = pool(runner, pooling_request(0, ids, pooling))
        assert vector == pytest.approx(expected(oracle, ids, pooling), abs=2e-6)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_chunks_give_the_vector_of_the_whole(runner: TorchRunner, pooling: str, chunk: int) -> None:
    whole = pool(runner, pooling_request(0, PROMPT, pooling))
    assert pool(runner, pooling_request(1, PROMPT, pooling), chunk) == whole


@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_that_begins_anew_on_another_row_or_its_own_gives_the_same(runner: TorchRunner, pooling: str) -> None:
    whole = pool(runner, pooling_request(0, PROMPT, pooling))
    run(runner, step(0, [(1, 0, 5)], [pooling_request(1, PROMPT, pooling)], flags=[0]))
    for row in (2, 1):
        assert pool(runner, pooling_request(row, PROMPT, pooling, epoch=row + 1), 4) == whole
    run(runner, step(0, [(3, 0, 5)], [pooling_request(3, PROMPT, pooling)], flags=[0]))
    runner.reset()
    assert pool(runner, pooling_request(3, PROMPT, pooling)) == whole


def test_neighbours_change_nothing_and_are_not_changed(runner: TorchRunner) -> None:
    alone = {pooling: pool(runner, pooling_request(0, PROMPT, pooling)) for pooling in POOLINGS}
    new = request(0, PROMPT[:4], temperature=0)
    tokens = [run(runner, step(0, [(0, 0, 4)], [new])).results[0].token_ids]
    tokens += [run(runner, step(1, [(0, 4 + at, 1)])).results[0].token_ids for at in range(2)]
    rows = [
        request(0, PROMPT[:4], temperature=0),
        pooling_request(1, PROMPT, "mean"),
        pooling_request(2, PROMPT, "last"),
    ]
    blocks = {0: range(5), 1: range(5, 9), 2: range(9, 12)}
    given = []
    first = run(runner, step(0, [(1, 0, 6), (0, 0, 4), (2, 0, 3)], rows, blocks=blocks, flags=[0, SAMPLES, 0]))
    given.append(first.results[0].token_ids)
    second = run(runner, step(1, [(2, 3, 8), (1, 6, 2), (0, 4, 1)], flags=[POOLS, 0, SAMPLES]))
    given.append(next(result.token_ids for result in second.results if result.row == 0))
    third = run(runner, step(2, [(0, 5, 1), (1, 8, 3)], flags=[SAMPLES, POOLS]))
    given.append(third.results[0].token_ids)
    assert [result.row for result in third.results] == [0, 1], "in the order of the batch"
    assert given == tokens
    assert vector_of(second, 2) == alone["last"]
    assert vector_of(third, 1) == alone["mean"]


def test_the_last_token_alone_after_a_prefix_that_another_computed(runner: TorchRunner) -> None:
    prompt = PROMPT[:8]  # two full blocks
    whole = pool(runner, pooling_request(0, prompt, "last"))
    new = pooling_request(1, prompt, "last")
    given = step(0, [(1, 7, 1)], [new], blocks={1: [0, 1]}, first_writable=[8], flags=[POOLS])
    assert vector_of(run(runner, given), 1) == whole


def test_a_mean_without_its_beginning_and_a_row_that_asked_for_none_fail(runner: TorchRunner) -> None:
    new = [pooling_request(0, PROMPT, "mean"), pooling_request(1, PROMPT, None), pooling_request(2, PROMPT, "last")]
    rows = [(0, 4, 7), (1, 0, 11), (2, 0, 4)]
    blocks = {row: range(row * 4, row * 4 + 4) for row in range(3)}
    output = run(runner, step(0, rows, new, blocks=blocks, flags=[POOLS] * 3))
    assert [result.status for result in output.results] == [ROW_FAILED] * 3
    assert output.pooled == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_what_is_not_finite_fails_its_row_alone(runner: TorchRunner, value: float) -> None:
    forward = runner._model.forward  # type: ignore[union-attr]

    def spoiled(*given: Any) -> torch.Tensor:
        hidden_TD = forward(*given).clone()
        hidden_TD[:3] = value
        return hidden_TD

    runner._model.forward = spoiled  # type: ignore[union-attr, method-assign]
    new = [pooling_request(row, PROMPT[:3], POOLINGS[row % 2]) for row in range(4)]
    blocks = {row: [row] for row in range(4)}
    output = run(runner, step(0, [(row, 0, 3) for row in range(4)], new, blocks=blocks, flags=[POOLS] * 4))
    assert [result.status for result in output.results] == [ROW_NOT_FINITE, ROW_OK, ROW_OK, ROW_OK]
    assert [pooled.row for pooled in output.pooled] == [1, 2, 3]
    assert all(isinstance(pooled, Pooled) and math.isfinite(sum(pooled.values)) for pooled in output.pooled)


def test_rows_that_do_not_pool_keep_nothing(runner: TorchRunner) -> None:
    pool(runner, pooling_request(0, PROMPT, "mean"))
    run(runner, step(1, [(1, 0, 3)], [request(1, PROMPT[:3])], freed=[0]))
    assert runner._pooler._sums == {}
