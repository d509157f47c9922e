"""The torch runner on a tiny model with random weights: the same tokens however the work is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from services.common.errors import FailedPrecondition, InvalidArgument
from services.worker.config import WorkerSettings
from services.worker.models.decoder import Decoder
from services.worker.runner import TorchRunner
from services.worker.step import (
    PROMPT_LOGPROBS,
    ROW_FAILED,
    ROW_NOT_FINITE,
    ROW_OK,
    SAMPLES,
    CacheShape,
    Candidate,
    NewRow,
    StepOutput,
)
from services.worker.toy_text import VOCAB_SIZE
from tests.worker.columns import SHAPE, request, run, step
from tests.worker.on_host import device_runner_of
from tests.worker.tiny_llama import HEAD, HIDDEN, KV_HEADS, PROMPT, runner_of, tiny_llama


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def runner(model_path: str) -> TorchRunner:
    return runner_of(model_path)


@pytest.fixture
def logits_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many positions there were logits at once, each time that there were some."""
    seen: list[int] = []
    logits = Decoder.logits

    def watched(model: Decoder, hidden_ND: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden_ND))
        return logits(model, hidden_ND)

    monkeypatch.setattr(Decoder, "logits", watched)
    return seen


def tokens_of(output: StepOutput) -> dict[int, int]:
    assert all(result.status == ROW_OK for result in output.results)
    return {result.row: result.token_ids[0] for result in output.results}


def generate(
    runner: TorchRunner, new: NewRow, count: int, chunk: int = 64, blocks: Sequence[int] = range(1, 13)
) -> list[int]:
    """`count` tokens of one request alone, its prompt in chunks."""
    known, made, number = len(new.tokens), [], 0
    for start in range(0, known, chunk):
        size = min(chunk, known - start)
        flags = [SAMPLES if start + size == known else 0]
        first = start == 0
        given = step(
            number,
            [(new.row, start, size)],
            [new] if first else (),
            blocks={new.row: blocks} if first else {},
            flags=flags,
        )
        output, number = run(runner, given), number + 1
    made += tokens_of(output).values()
    for index in range(count - 1):
        made += tokens_of(run(runner, step(number + index, [(new.row, known + index, 1)]))).values()
    return made


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
]


class TestEquality:
    @pytest.mark.parametrize("sampling", SAMPLING)
    @pytest.mark.parametrize("chunk", [1, 3, 4, 10])
    def test_chunks_give_the_tokens_of_the_whole(
        self, runner: TorchRunner, sampling: dict[str, Any], chunk: int
    ) -> None:
        whole = generate(runner, request(0, PROMPT, **sampling), 12)
        assert len(set(whole)) > 2
        assert generate(runner, request(1, PROMPT, **sampling), 12, chunk, blocks=range(20, 32)) == whole

    @pytest.mark.parametrize("sampling", SAMPLING)
    def test_preempted_and_resumed_on_another_row(self, runner: TorchRunner, sampling: dict[str, Any]) -> None:
        whole = generate(runner, request(0, PROMPT, **sampling), 12)
        first = generate(runner, request(1, PROMPT, **sampling), 5)
        resumed = request(2, [*PROMPT, *first], prompt_len=len(PROMPT), epoch=2, **sampling)
        assert first + generate(runner, resumed, 7, blocks=range(40, 52)) == whole

    @pytest.mark.parametrize("sampling", SAMPLING)
    def test_neighbours_change_nothing(self, runner: TorchRunner, sampling: dict[str, Any]) -> None:
        alone = generate(runner, request(0, PROMPT, **sampling), 6)
        new = [request(0, [7], seed=9), request(1, PROMPT, **sampling), request(3, [1, 2, 3, 4], seed=10, top_p=0.5)]
        blocks = {0: range(5), 1: range(5, 11), 3: range(11, 16)}
        order = [(3, 4), (0, 1), (1, len(PROMPT))]
        made = [tokens_of(run(runner, step(0, [(row, 0, size) for row, size in order], new, blocks=blocks)))[1]]
        for number in range(5):
            rows = [(row, size + number, 1) for row, size in order]
            made.append(tokens_of(run(runner, step(number + 1, rows)))[1])
        assert made == alone

    def test_a_full_prefix_hit_recomputes_one_token_and_writes_nothing(self, runner: TorchRunner) -> None:
        prompt = PROMPT[:8]  # two full blocks
        whole = generate(runner, request(0, prompt, temperature=0), 6, blocks=[1, 2, 3, 4])
        cache = runner._cache
        assert cache is not None
        shared = [tensor[2].clone() for tensor in cache.layer(1)]
        new = request(1, prompt, temperature=0)
        made = [tokens_of(run(runner, step(0, [(1, 7, 1)], [new], blocks={1: [1, 2]}, first_writable=[8])))[1]]
        assert all(torch.equal(tensor[2], kept) for tensor, kept in zip(cache.layer(1), shared, strict=True))
        for index in range(5):
            blocks = {1: [9, 10]} if index == 0 else {}
            made.append(tokens_of(run(runner, step(1, [(1, 8 + index, 1)], blocks=blocks)))[1])
        assert made == whole


class TestLogprobs:
    def prompt_entries(self, runner: TorchRunner, chunk: int, top: int = 3) -> list[tuple[Candidate, ...]]:
        new = request(0, PROMPT, temperature=0, prompt_logprobs=top)
        entries: list[tuple[Candidate, ...]] = []
        for start in range(0, len(PROMPT), chunk):
            size = min(chunk, len(PROMPT) - start)
            last = start + size == len(PROMPT)
            first = start == 0
            output = run(
                runner,
                step(
                    start,
                    [(0, start, size)],
                    [new] if first else (),
                    blocks={0: range(6)} if first else {},
                    flags=[PROMPT_LOGPROBS | (SAMPLES if last else 0)],
                ),
            )
            (part,) = output.prompt_logprobs
            assert part.first_position == len(entries)
            entries += part.positions
        return entries

    def test_every_prompt_position_once_however_it_is_cut(self, model_path: str, runner: TorchRunner) -> None:
        whole = self.prompt_entries(runner, len(PROMPT))
        assert [entries[0].token_id for entries in whole[1:]] == PROMPT[1:]
        assert whole[0] == ()
        for chunk in (1, 2, 5):
            for position, entries in enumerate(self.prompt_entries(runner, chunk)):
                assert [entry[::2] for entry in entries] == [entry[::2] for entry in whole[position]]
                for one, other in zip(entries, whole[position], strict=True):
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert self.prompt_entries(runner_of(model_path, logits_rows=2), len(PROMPT)) == whole

    def test_so_many_positions_have_logits_at_once_and_no_more(
        self, model_path: str, logits_at_once: list[int]
    ) -> None:
        """Four prompts in one step, each longer than the bound."""
        runner = runner_of(model_path, logits_rows=3)
        logits_at_once.clear()
        news = [request(row, PROMPT[:8], temperature=0, logprobs=0, prompt_logprobs=1) for row in range(4)]
        flags = [PROMPT_LOGPROBS | SAMPLES] * 4
        blocks = {row: range(row * 4, row * 4 + 4) for row in range(4)}
        output = run(runner, step(0, [(row, 0, 8) for row in range(4)], news, blocks=blocks, flags=flags))
        assert [len(part.positions) for part in output.prompt_logprobs] == [8] * 4
        assert max(logits_at_once) == 3
        assert sum(logits_at_once) == 4 * 7 + 4  # a position without a next token of the prompt only samples

    def test_they_are_the_models(self, runner: TorchRunner) -> None:
        """Each entry is what sampling there would have reported for the likeliest, and the sum is one."""
        entries = self.prompt_entries(runner, len(PROMPT))
        for position in (1, 4, 10):
            new = request(1, PROMPT[:position], temperature=0, logprobs=3)
            (result,) = run(runner, step(0, [(1, 0, position)], [new], blocks={1: range(20, 26)})).results
            assert [entry.token_id for entry in result.logprobs[0][1:]] == [e.token_id for e in entries[position][1:]]
            assert result.logprobs[0][0].logprob == pytest.approx(entries[position][1].logprob, abs=1e-5)
        assert all(math.isfinite(entry.logprob) and entry.logprob < 0 for part in entries for entry in part)


class TestFailures:
    def test_a_row_with_a_poisoned_cache_fails_alone(self, runner: TorchRunner) -> None:
        new = [request(0, PROMPT, temperature=0), request(1, PROMPT, temperature=0)]
        blocks = {0: range(4), 1: range(4, 8)}
        run(runner, step(0, [(0, 0, 11), (1, 0, 11)], new, blocks=blocks))
        assert runner._cache is not None
        for tensor in runner._cache.layer(0):
            tensor[5] = math.nan
        output = run(runner, step(1, [(0, 11, 1), (1, 11, 1)]))
        assert [result.status for result in output.results] == [ROW_OK, ROW_NOT_FINITE]
        late = run(runner, step(2, [(0, 12, 1), (1, 12, 1)]))
        assert [result.status for result in late.results] == [ROW_OK, ROW_FAILED]

    def test_rows_without_a_request_fail_alone(self, runner: TorchRunner) -> None:
        output = run(runner, step(0, [(2, 0, 1), (0, 0, 3)], [request(0, [1, 2, 3], epoch=8)], blocks={0: [0]}))
        assert [(result.row, result.epoch, result.status) for result in output.results] == [
            (2, 0, ROW_FAILED),
            (0, 8, ROW_OK),
        ]

    def test_reset_empties_all_rows(self, runner: TorchRunner) -> None:
        run(runner, step(0, [(0, 0, 3)], [request(0, [1, 2, 3])], blocks={0: [0]}))
        runner.reset()
        assert run(runner, step(1, [(0, 3, 1)])).results[0].status == ROW_FAILED

    def test_a_step_that_only_frees(self, runner: TorchRunner) -> None:
        assert run(runner, step(0, freed=[1, 2])).results == ()

    def test_out_of_order(self, model_path: str) -> None:
        bare = TorchRunner(WorkerSettings.build())
        with pytest.raises(FailedPrecondition, match="no model is named"):
            bare.load("", None)
        with pytest.raises(FailedPrecondition, match="no model is loaded"):
            bare.plan_memory(SHAPE, None)
        bare.load(model_path, None)
        with pytest.raises(FailedPrecondition, match="InitCache"):
            run(bare, step(0))


class TestMemory:
    def test_the_plan_is_in_bytes_and_adds_up(self, model_path: str) -> None:
        plan = runner_of(model_path).plan_memory(SHAPE, 1 << 20)
        per_token = 2 * 2 * KV_HEADS * HEAD * 4
        assert (plan.bytes_per_block, plan.num_blocks) == (per_token * 4, (1 << 20) // (per_token * 4))
        assert plan.kv_cache_bytes == plan.num_blocks * plan.bytes_per_block
        assert plan.weight_bytes > VOCAB_SIZE * HIDDEN * 4
        assert "largest step" in plan.summary

    def test_the_settings_say_how_much_unless_the_engine_does(self, model_path: str) -> None:
        runner = runner_of(model_path, kv_cache_bytes=1 << 16)
        assert runner.plan_memory(SHAPE, None).kv_cache_bytes == 1 << 16
        assert runner.plan_memory(SHAPE, 1 << 17).kv_cache_bytes == 1 << 17
        free = runner_of(model_path, kv_cache_fraction=0.01).plan_memory(SHAPE, None)
        assert free.num_blocks > 16

    @pytest.mark.parametrize(
        ("kv_cache_bytes", "message"),
        [(100, "not even one KV block"), (4096, "needs 16 blocks"), (1 << 50, "do not fit in")],
    )
    def test_what_cannot_work_is_refused_with_the_sum(self, model_path: str, kv_cache_bytes: int, message: str) -> None:
        with pytest.raises(FailedPrecondition, match=message) as caught:
            runner_of(model_path).plan_memory(SHAPE, kv_cache_bytes)
        assert "weights" in caught.value.message

    def test_the_largest_step_is_measured(self, model_path: str) -> None:
        """Attention scores of 128 queries and 4 heads over 4096 keys alone are 8 MiB."""
        shape = CacheShape(1, 16, 4, 4096, 4096)
        assert runner_of(model_path).plan_memory(shape, 1 << 24).step_bytes > 4 << 20

    @pytest.mark.parametrize("make", [runner_of, device_runner_of])
    def test_the_largest_step_has_as_many_logits_as_may_exist_at_once(
        self, model_path: str, logits_at_once: list[int], make: Callable[..., TorchRunner]
    ) -> None:
        runner = make(model_path, logits_rows=7)
        for rows in (4, 9):  # of which one has drafts; and two chunks
            runner.plan_memory(CacheShape(1, 16, rows, 64, 64), 1 << 24)
        assert logits_at_once == ([7, 7] if make is runner_of else [7, 7, 2])


@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_the_time_inside_native_kernels_is_counted(model_path: str, ops: str) -> None:
    runner = runner_of(model_path, ops=ops)
    outputs = [run(runner, step(1, [(0, 0, 5)], [request(0, PROMPT[:5])])), run(runner, step(2, [(0, 5, 1)]))]
    if runner._model is not None and runner._model.ops.name == "native":
        assert all(output.kernel_s > 0 for output in outputs)
    else:
        assert all(output.kernel_s == 0 for output in outputs)


def test_a_quantization_that_is_asked_for_is_what_the_setting_would_be(model_path: str) -> None:
    settings = {"threads": 1, "ops": "auto"}
    asked = TorchRunner(WorkerSettings.build(**settings)).load(model_path, None, "int8")
    set_so = TorchRunner(WorkerSettings.build(**settings, quantize="int8")).load(model_path, None)
    undone = TorchRunner(WorkerSettings.build(**settings, quantize="int8")).load(model_path, None, "none")
    plain = TorchRunner(WorkerSettings.build(**settings)).load(model_path, None)
    assert asked.weight_memory == set_so.weight_memory
    assert undone.weight_memory == plain.weight_memory
    with pytest.raises(InvalidArgument, match="int3") as caught:
        TorchRunner(WorkerSettings.build(**settings)).load(model_path, None, "int3")
    assert caught.value.field == "quantization"


@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_greedy_steps_do_without_logits_and_give_the_same(model_path: str, ops: str, logits_at_once: list[int]) -> None:
    runner = runner_of(model_path, ops=ops)
    tokens = generate(runner, request(0, PROMPT, temperature=0.0), 8)
    assert logits_at_once == []  # not in the prompt's step either, most of whose tokens sample nothing
    assert generate(runner, request(0, PROMPT, temperature=0.0, logprobs=0), 8) == tokens
    assert logits_at_once == 8 * [1]
