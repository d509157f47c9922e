"""Drafts change how many tokens a step gives, and never which: against the same runner without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from services.worker.runner import TorchRunner
from services.worker.sampling.sampler import Sampled
from services.worker.speculative import accept
from services.worker.step import ROW_FAILED, ROW_NOT_FINITE, ROW_OK, Candidate, NewRow, RowResult
from services.worker.toy_text import VOCAB_SIZE
from tests.worker.columns import request, run, step
from tests.worker.on_host import device_runner_of
from tests.worker.sequences import poison
from tests.worker.tiny_llama import PROMPT, runner_of, tiny_llama

COUNT = 30
Propose = Callable[[list[int], int], list[int]]
"""Drafts from the right continuation and the number of the step."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(runner_of, id="host"), pytest.param(device_runner_of, id="device", marks=pytest.mark.slow)],
)
def runner(model_path: str, request: pytest.FixtureRequest) -> TorchRunner:
    made: TorchRunner = request.param(model_path)
    return made


def wrong(token: int) -> int:
    return (token + 1) % VOCAB_SIZE


def good(right: list[int], number: int) -> list[int]:
    return right[: 1 + number % 5]


def bad(right: list[int], number: int) -> list[int]:
    return [wrong(token) for token in right[: 1 + number % 3]]


def mixed(right: list[int], number: int) -> list[int]:
    """Right up to a point that moves, with steps without drafts in between."""
    drafts = right[: number % 6]
    return [wrong(token) if place == number % 4 else token for place, token in enumerate(drafts)]


def plain(runner: TorchRunner, new: NewRow, count: int, blocks: Sequence[int]) -> list[RowResult]:
    """One token per step."""
    known = len(new.tokens)
    results = list(run(runner, step(0, [(new.row, 0, known)], [new], blocks={new.row: blocks})).results)
    for index in range(count - 1):
        results += run(runner, step(index + 1, [(new.row, known + index, 1)])).results
    return results


def flat(results: Sequence[RowResult]) -> tuple[list[int], list[tuple[Candidate, ...]]]:
    assert all(result.status == ROW_OK for result in results)
    tokens = [token for result in results for token in result.token_ids]
    return tokens, [entries for result in results for entries in result.logprobs]


def speculated(
    runner: TorchRunner, new: NewRow, right: list[int], propose: Propose, blocks: Sequence[int]
) -> list[RowResult]:
    """As many tokens as `right` has, with drafts from it."""
    results = list(run(runner, step(0, [(new.row, 0, len(new.tokens))], [new], blocks={new.row: blocks})).results)
    made = 1
    for number in range(len(right)):
        if made >= len(right):
            break
        drafts = propose(right[made:-1], number)
        computed = len(new.tokens) + made - 1
        given = step(number + 1, [(new.row, computed, 1 + len(drafts))], drafts={new.row: drafts})
        results += run(runner, given).results
        made += len(results[-1].token_ids)
    return results


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 1.5, "seed": 3, "logprobs": 0},
    "cutoffs": {"temperature": 1.2, "seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "greedy-penalties": {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 1.5, "presence_penalty": 1},
    "seeded-penalties": {"seed": 5, "frequency_penalty": 2.0, "presence_penalty": -1.0, "logprobs": 1},
    "output-penalties": {"temperature": 0, "frequency_penalty": 2.0},
    "end-masked": {"temperature": 0, "min_tokens": 17, "eos_ids": tuple(range(200)), "stop_ids": (210, 211)},
    "banned": {"temperature": 0, "banned_sequences": tuple((a, b) for a in range(259) for b in range(0, 259, 37))},
    "biased": {"seed": 6, "logit_bias": ((17, 6.0), (18, -100.0)), "allowed_ids": tuple(range(90))},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_the_tokens_and_log_probabilities_of_the_run_without_drafts(
    runner: TorchRunner, sampling: dict[str, Any]
) -> None:
    right, logprobs = flat(plain(runner, request(0, PROMPT, **sampling), COUNT, range(16)))
    steps = []
    for row, propose in enumerate((good, bad, mixed), 1):
        results = speculated(runner, request(row, PROMPT, **sampling), right, propose, range(16, 32))
        tokens, entries = flat(results)
        assert tokens == right
        assert [[entry[::2] for entry in one] for one in entries] == [[entry[::2] for entry in one] for one in logprobs]
        for one, other in zip(entries, logprobs, strict=True):
            assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-5)
        steps.append(len(results))
    assert steps[0] <= COUNT // 3
    assert steps[1] == COUNT
    assert steps[0] < steps[2] < COUNT


@pytest.mark.parametrize("settings", [{"deterministic": False}, {"logits_rows": 2}], ids=["default-mode", "few-logits"])
def test_the_same_in_other_modes(model_path: str, settings: dict[str, Any]) -> None:
    runner = runner_of(model_path, **settings)
    for sampling in (SAMPLING["greedy"], SAMPLING["seeded-penalties"]):
        right, _ = flat(plain(runner, request(0, PROMPT, **sampling), COUNT, range(16)))
        assert flat(speculated(runner, request(1, PROMPT, **sampling), right, mixed, range(16, 32)))[0] == right


def test_drafts_that_go_on_behind_an_end_id(runner: TorchRunner) -> None:
    """The end id is a token like any other here; one in the wrong place is rejected."""
    right, _ = flat(plain(runner, request(0, PROMPT, temperature=0), 8, range(16)))
    ending = request(1, PROMPT, temperature=0, eos_ids=(right[3],))
    run(runner, step(0, [(1, 0, len(PROMPT))], [ending], blocks={1: range(16, 32)}))
    drafts = [right[1], right[2], right[3], wrong(right[4])]
    (result,) = run(runner, step(1, [(1, len(PROMPT), 5)], drafts={1: drafts})).results
    assert list(result.token_ids) == right[1:5]
    early = step(2, [(1, len(PROMPT) + 4, 3)], drafts={1: [right[3], right[5]]})
    assert run(runner, early).results[0].token_ids == (right[5],)


def test_rows_with_drafts_beside_rows_that_prefill_decode_and_end(runner: TorchRunner) -> None:
    """Each gets what it gets alone."""
    sampling = {"seed": 8, "temperature": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.1}
    other = [*PROMPT[3:], 7, 9]
    long = [(7 * place) % VOCAB_SIZE for place in range(24)]
    alone = [
        flat(plain(runner, request(0, ids, **sampling), 12, range(16)))[0] for ids in (PROMPT, other, long[:20], long)
    ]
    new = [request(0, PROMPT, **sampling), request(1, other, **sampling), request(2, long[:20], **sampling)]
    blocks = {row: range(16 * row, 16 * row + 16) for row in range(4)}
    first = run(runner, step(0, [(row, 0, len(new[row].tokens)) for row in range(3)], new, blocks=blocks))
    made = [list(result.token_ids) for result in first.results]
    for number in range(1, 4):
        drafts = {0: alone[0][len(made[0]) :][:2], 1: [wrong(token) for token in alone[1][len(made[1]) :][:3]]}
        listed = [
            (0, len(PROMPT) + len(made[0]) - 1, 1 + len(drafts[0])),
            (3, 8 * (number - 1), 8),
            (2, 20 + len(made[2]) - 1, 1),
            (1, len(other) + len(made[1]) - 1, 4),
        ]
        given = step(
            number,
            listed,
            [request(3, long, **sampling)] if number == 1 else (),
            flags=[1, number == 3, 1, 1],
            drafts=drafts,
            blocks={3: blocks[3]} if number == 1 else {},
        )
        for result in run(runner, given).results:
            assert result.status == ROW_OK
            made += [[]] * (result.row - len(made) + 1)
            made[result.row] += result.token_ids
    assert [len(tokens) for tokens in made] == [10, 4, 4, 1]
    assert made == [tokens[: len(some)] for tokens, some in zip(alone, made, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"ops": "torch"}, {"ops": "reference", "logits_rows": 2}])
def test_greedy_rows_of_mixed_steps_do_without_logits(
    model_path: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give what rows give that also want log probabilities: chunks, drafts, a decoding row, one that fails."""

    def results(runner: TorchRunner, **sampling: Any) -> list[Any]:
        news = [request(row, PROMPT, temperature=0, **sampling) for row in range(4)]
        blocks = {row: range(16 * row, 16 * row + 16) for row in range(4)}
        outputs = [run(runner, step(0, [(row, 0, 11) for row in range(3)], news[:3], blocks=blocks))]
        poison(runner, 32)  # the first of the third row
        listed, drafts = [(0, 11, 3), (3, 0, 6), (2, 11, 2), (1, 11, 1)], {0: [right[1], wrong(right[2])], 2: [5]}
        outputs.append(run(runner, step(1, listed, news[3:], flags=[1, 0, 1, 1], blocks=blocks, drafts=drafts)))
        listed, drafts = [(3, 6, 5), (1, 12, 4), (0, 13, 1)], {1: right[2:5]}
        outputs.append(run(runner, step(2, listed, drafts=drafts)))
        return [[(each.row, each.status, each.token_ids) for each in output.results] for output in outputs]

    right, _ = flat(plain(runner_of(model_path), request(0, PROMPT, temperature=0), 6, range(16)))
    with_logits = results(runner_of(model_path, **settings), logprobs=0)
    runner = runner_of(model_path, **settings)
    model, _ = runner._model_of("test")
    at_once: list[int] = []
    likeliest_of = model.likeliest_of
    monkeypatch.setattr(model, "logits", None)
    monkeypatch.setattr(model, "likeliest_of", lambda x_SD: at_once.append(len(x_SD)) or likeliest_of(x_SD))
    assert results(runner) == with_logits
    assert with_logits[1] == [
        (0, ROW_OK, tuple(right[1:3])),
        (2, ROW_NOT_FINITE, ()),
        (1, ROW_OK, (right[1],)),
    ]
    assert with_logits[2] == [(3, ROW_OK, (right[0],)), (1, ROW_OK, tuple(right[2:6])), (0, ROW_OK, (right[3],))]
    assert at_once == ([2, 1, 2, 2, 2, 2, 2, 2] if "logits_rows" in settings else [3, 6, 6])


def test_rows_without_drafts_take_one_position_each(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(model_path)
    model, _ = runner._model_of("test")
    asked: list[int] = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden_SD: asked.append(len(hidden_SD)) or logits(hidden_SD))
    new = [request(row, PROMPT, temperature=0, logprobs=0) for row in range(3)]
    run(runner, step(0, [(row, 0, len(PROMPT)) for row in range(3)], new))
    run(runner, step(1, [(row, len(PROMPT), 1 + 2 * (row == 1)) for row in range(3)], drafts={1: [5, 6]}))
    assert asked == [3, 5]


def test_up_to_the_end_of_the_context(runner: TorchRunner) -> None:
    new = request(0, range(60), temperature=0)
    right, _ = flat(plain(runner, new, 4, range(16)))
    run(runner, step(0, [(1, 0, 60)], [request(1, range(60), temperature=0)], blocks={1: range(16, 32)}))
    (result,) = run(runner, step(1, [(1, 60, 4)], drafts={1: right[1:]})).results
    assert list(result.token_ids[:3]) == right[1:]
    (last,) = run(runner, step(2, [(0, 63, 1)])).results  # it has no place in the context any more
    assert result.token_ids[3:] == last.token_ids


def test_drafts_that_do_not_lie_behind_the_last_known_id_fail_their_row_alone(runner: TorchRunner) -> None:
    new = [request(0, PROMPT, temperature=0), request(1, PROMPT, temperature=0)]
    run(runner, step(0, [(0, 0, 11), (1, 0, 11)], new))
    for computed, count in ((10, 3), (11, 4), (8, 3)):
        output = run(runner, step(1, [(0, computed, count), (1, 11, 1)], drafts={0: [5, 6]}))
        assert [result.status for result in output.results] == [ROW_FAILED, ROW_OK]
        run(runner, step(2, [(1, 0, 11)], [request(1, PROMPT, temperature=0)], freed=[1]))
    assert run(runner, step(3, [(0, 11, 3)], drafts={0: [5, 6]})).results[0].status == ROW_OK


def test_rejected_drafts_leave_nothing_in_a_row_that_another_request_takes(runner: TorchRunner) -> None:
    sampling = {"temperature": 0, "repetition_penalty": 1.5}
    right, _ = flat(plain(runner, request(0, PROMPT, **sampling), 6, range(16)))
    run(runner, step(0, [(1, 0, 3)], [request(1, [1, 2, 3], **sampling)], blocks={1: range(16, 32)}))
    run(runner, step(1, [(1, 3, 6)], drafts={1: [9, 9, 9, 9, 9]}))
    run(runner, step(2, freed=[1]))
    assert flat(plain(runner, request(1, PROMPT, epoch=2, **sampling), 6, range(16, 32)))[0] == right


def test_a_position_without_a_token_ends_the_answer_before_it() -> None:
    one, two, none = Sampled(ROW_OK, 1), Sampled(ROW_OK, 2), Sampled(ROW_NOT_FINITE, None)
    assert accept([], [one]) == [one]
    assert accept([1, 2], [one, two, one]) == [one, two, one]
    assert accept([1, 3], [one, two, one]) == [one, two]
    assert accept([2, 2], [one, two, one]) == [one]
    assert accept([1, 2], [one, none, one]) == [one]
    assert accept([1], [none, one]) == [none]


def test_a_poisoned_draft_position_costs_no_token_before_it(model_path: str) -> None:
    """A logit that is not finite behind the second token fails the row in the next step, as it would without drafts."""
    runner = runner_of(model_path)
    right, _ = flat(plain(runner, request(0, PROMPT, temperature=0), 4, range(16)))
    new = request(1, PROMPT, temperature=0, logprobs=0)  # so that there are logits
    run(runner, step(0, [(1, 0, 11)], [new], blocks={1: range(16, 32)}))
    model, _ = runner._model_of("test")
    logits = model.logits

    def poisoned(hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV = logits(hidden_SD)
        logits_SV[1:] = torch.nan
        return logits_SV

    model.logits = poisoned  # type: ignore[method-assign]
    (result,) = run(runner, step(1, [(1, 11, 3)], drafts={1: right[1:3]})).results
    assert (result.status, result.token_ids) == (ROW_OK, (right[1],))
    del model.logits
    assert run(runner, step(2, [(1, 12, 1)])).results[0].token_ids == (right[2],)
