"""The core from outside: taking in, ending, failing, telling."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from services.common.errors import InvalidArgument, ResourceExhausted, TriptychError
from services.engine.events import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP_ID,
    FINISH_STOP_STRING,
    Failed,
    Owner,
)
from services.engine.plan import (
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_NO_TOKEN,
    ROW_NOT_FINITE,
    SAMPLES,
    STEP_OK,
    STEP_SKIPPED,
    StepOutcome,
)
from services.engine.request import Replay, RequestSpec, choice_seed
from tests.engine.fake_worker import LOGPROBS, undisturbed
from tests.engine.harness import GATEWAY, Harness, make_config, make_spec

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def refused(harness: Harness, spec: RequestSpec) -> TriptychError:
    """The error, after a look that nothing was left behind."""
    before = harness.core.load()
    with pytest.raises(TriptychError) as error:
        harness.core.submit(spec, 0.0)
    assert harness.core.load() == before
    return error.value


# Taking in


def test_a_request_from_its_prompt_to_its_end() -> None:
    harness = Harness()
    harness.now = 5.0
    harness.submit(make_spec(0, PROMPT, 6))
    assert harness.core.has_work
    harness.run()
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 6)
    assert harness.heard[0, 0].finish == FINISH_LENGTH
    assert (harness.started[0].queue_s, harness.started[0].cached_tokens) == (1.0, 0)
    counters = harness.core.counters
    assert (counters.prompt_tokens, counters.generated_tokens, counters.preemptions) == (9, 6, 0)
    assert not harness.core.has_work


def test_a_prompt_that_the_pool_cannot_hold_is_refused_and_the_next_one_runs() -> None:
    harness = Harness(make_config(num_blocks=4))
    assert harness.core.context_len == 16
    error = refused(harness, make_spec(0, [1] * 16))
    assert isinstance(error, InvalidArgument)
    assert error.field == "prompt"
    assert "16 tokens; the context holds 16" in error.message
    harness.submit(make_spec(1, [1] * 15, 50))
    harness.run()
    assert harness.tokens(1) == undisturbed([1] * 15, 1, 1)
    assert harness.heard[1, 0].finish == FINISH_LENGTH


def test_queue_limits_are_exact_and_count_choices() -> None:
    harness = Harness(make_config(max_waiting_requests=5, max_waiting_tokens=20))
    harness.submit(make_spec(0, [1, 2], n=3))
    assert isinstance(refused(harness, make_spec(1, [1], n=3)), ResourceExhausted)
    harness.submit(make_spec(1, [1], n=2))
    assert refused(harness, make_spec(2, [1])).retry_after_ms is not None
    harness.abort(0, 2)
    assert "prompt tokens" in refused(harness, make_spec(2, [1] * 15)).message
    harness.submit(make_spec(2, [1] * 14))
    assert isinstance(refused(harness, make_spec(3, [1], n=6)), InvalidArgument)
    harness.run()
    assert harness.core.load().waiting_tokens == 0


def test_running_requests_do_not_count_as_waiting() -> None:
    harness = Harness(make_config(max_waiting_requests=1))
    for handle in range(4):
        harness.submit(make_spec(handle, [1, 2], 3))
        refused(harness, make_spec(9, [1]))
        assert harness.plan() is not None
        harness.apply()
    harness.run()


def test_names_in_use_are_refused_and_free_again_at_the_end() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT))
    assert refused(harness, make_spec(0, PROMPT, token=b"new")).field == "handle"
    assert refused(harness, make_spec(1, PROMPT, token=bytes(16))).field == "token"
    harness.run()
    harness.submit(make_spec(0, PROMPT))
    harness.run()


def test_deadlines_end_only_who_has_not_run() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.submit(make_spec(0, PROMPT, 20, deadline_s=3.0))
    harness.submit(make_spec(1, PROMPT, 20, n=2, deadline_s=5.0))
    harness.submit(make_spec(2, PROMPT, 2))
    harness.turn()
    assert harness.core.expire(4.9) == []
    (event,) = harness.core.expire(5.0)
    assert isinstance(event, Failed)
    assert (event.owner.handle, event.choice, event.failure.code) == (1, None, 4)
    harness.hear([event])
    assert harness.core.expire(100.0) == []
    harness.run()
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 20)


# Several choices


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_share_the_prompt_that_the_first_one_computed(depth: int) -> None:
    harness = Harness(make_config(max_num_seqs=8, max_num_batched_tokens=4, steps_in_flight=depth))
    harness.submit(make_spec(0, PROMPT, 5, n=4, seed=3))
    harness.run()
    for choice in range(4):
        assert harness.tokens(0, choice) == undisturbed(PROMPT, choice_seed(3, choice), 5)
    prompt_tokens = sum(plan.total_tokens for plan in harness.plans) - 4 * 4
    assert prompt_tokens == 9 + 3 * 1
    assert harness.core.counters.prompt_tokens == 9
    assert (harness.core.counters.prefix_queries, harness.core.counters.prefix_hits) == (9, 0)  # told once


def test_another_choice_takes_over_a_prompt_whose_first_one_is_aborted() -> None:
    harness = Harness(make_config(max_num_batched_tokens=4))
    harness.submit(make_spec(0, PROMPT, 5, n=3, prompt_logprobs=0))
    harness.turn()
    harness.abort(0, 0)
    harness.abort(0, 1)
    harness.run()
    assert harness.tokens(0, 0) == []
    assert harness.tokens(0, 2) == undisturbed(PROMPT, choice_seed(1, 2), 5)
    assert len(harness.prompt_logprobs[0]) == 9


# Aborts


def test_an_abort_is_told_once_and_what_is_in_flight_is_dropped() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 20))
    for _ in range(3):
        harness.turn()
    assert harness.core.steps_in_flight == 1
    told = len(harness.tokens(0))
    harness.abort(0, reason=FINISH_STOP_STRING)
    harness.abort(0)
    harness.abort(99)
    assert harness.heard[0, 0].finish == FINISH_STOP_STRING
    harness.run()
    assert len(harness.tokens(0)) == told


def test_an_abort_in_the_queue() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.submit(make_spec(0, PROMPT))
    harness.submit(make_spec(1, PROMPT, n=2))
    harness.turn()
    harness.abort(1, 1)
    harness.abort(1)
    assert harness.core.load().waiting == 0
    harness.run()
    assert harness.heard[1, 0].finish == harness.heard[1, 1].finish == FINISH_ABORT


def test_a_gateway_that_is_gone_leaves_nothing() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 20, n=2))
    harness.submit(make_spec(1, PROMPT, 20))
    harness.submit(make_spec(2, PROMPT, 3, owner=Owner(5, 2)))
    for _ in range(3):
        harness.turn()
    assert harness.core.live_handles(GATEWAY) == [0, 1]
    harness.core.abort_gateway(GATEWAY)
    harness.core.abort_gateway(12345)
    harness.check()
    assert harness.core.live_handles(GATEWAY) == []
    assert harness.core.live_handles(5) == [2]
    while harness.turn():
        pass
    assert harness.tokens(2) == undisturbed(PROMPT, 1, 3)
    assert harness.core.load().free_blocks == 32


# Replays


def test_a_replay_goes_on_where_it_stopped() -> None:
    right = undisturbed(PROMPT, 1, 8)
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 8, replay=(Replay(array("i", right[:5])),)))
    harness.run()
    assert harness.tokens(0) == right
    assert harness.core.counters.generated_tokens == 3


def test_a_replay_of_several_choices_in_every_state() -> None:
    rights = [undisturbed(PROMPT, choice_seed(1, choice), 6) for choice in range(4)]
    replay = (
        Replay(array("i", rights[0][:2]), FINISH_STOP_STRING),
        Replay(array("i", rights[1])),
        Replay(array("i", rights[2][:3])),
        Replay(array("i")),
    )
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 6, n=4, replay=replay))
    assert harness.heard[0, 1].finish == FINISH_LENGTH
    harness.run()
    assert [harness.tokens(0, choice) for choice in range(4)] == [rights[0][:2], *rights[1:]]


def test_a_replay_whose_last_token_ends_it() -> None:
    right = undisturbed(PROMPT, 1, 3)
    for handle, (ends, finish) in enumerate(
        (({"eos_ids": frozenset({right[2]})}, FINISH_EOS), ({"stop_ids": frozenset({right[2]})}, FINISH_STOP_ID))
    ):
        harness = Harness()
        harness.submit(make_spec(handle, PROMPT, 9, replay=(Replay(array("i", right)),), **ends))
        assert harness.heard[handle, 0].finish == finish
        assert not harness.core.has_work


def test_a_replay_that_has_ended_leaves_nothing() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 9, replay=(Replay(array("i", [1]), FINISH_EOS),)))
    assert not harness.core.has_work
    harness.submit(make_spec(0, PROMPT, 2))
    harness.run()


def test_replays_skip_the_queue_limits() -> None:
    harness = Harness(make_config(max_waiting_requests=1))
    harness.submit(make_spec(0, PROMPT))
    harness.submit(make_spec(1, PROMPT, replay=(Replay(array("i", [])),)))
    harness.run()


# Log probabilities


def test_logprobs_are_cut_with_their_tokens() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 4))
    harness.submit(make_spec(1, PROMPT, 4, logprobs=1, sampling=LOGPROBS))
    harness.run()
    assert harness.heard[0, 0].logprobs == []
    assert harness.heard[1, 0].logprobs == [(token, token + 1) for token in harness.tokens(1)]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_are_told_once_however_the_prompt_runs(depth: int) -> None:
    harness = Harness(make_config(max_num_batched_tokens=4, steps_in_flight=depth))
    harness.submit(make_spec(9, PROMPT, 1))
    harness.run()
    harness.submit(make_spec(0, PROMPT, 4, prompt_logprobs=0))
    harness.turn()
    harness.turn()
    harness.lose_worker()
    harness.run()
    assert harness.prompt_logprobs[0] == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert harness.started[0].cached_tokens == 0
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 4)
    last_told = max(at for at, plan in enumerate(harness.plans) if any(flag & PROMPT_LOGPROBS for flag in plan.flags))
    harness.submit(make_spec(1, PROMPT, 4, prompt_logprobs=0, replay=(Replay(array("i", [1])),)))
    harness.run()
    assert 1 not in harness.prompt_logprobs
    assert all(not flag & PROMPT_LOGPROBS for plan in harness.plans[last_told + 1 :] for flag in plan.flags)


# Failures


def test_a_step_that_fails_fails_only_who_is_guilty() -> None:
    harness = Harness(make_config(max_num_batched_tokens=64, max_num_seqs=8))
    for handle in range(5):
        harness.submit(make_spec(handle, [handle, *PROMPT], 6))
    harness.turn()
    harness.worker.fails = lambda names: "r2" in names
    harness.run()
    for handle in (0, 1, 3, 4):
        assert harness.tokens(handle) == undisturbed([handle, *PROMPT], 1, 6)
    failed = harness.heard[2, 0].failed
    assert failed is not None
    assert (failed.choice, failed.failure.code, failed.failure.error_id) == (0, 13, "id")
    assert sum(plan.resync for plan in harness.plans) == 2


def test_who_waits_while_others_run_alone_is_told_so() -> None:
    harness = Harness(make_config(max_num_batched_tokens=64, steps_in_flight=1))
    for handle in range(3):
        harness.submit(make_spec(handle, [handle, *PROMPT], 4))
    harness.worker.fails = lambda names: len(names) > 1
    harness.turn()
    harness.submit(make_spec(3, PROMPT, 4))
    explanation = harness.core.explain((3).to_bytes(16, "big"))
    assert explanation is not None
    assert (explanation.reason, explanation.position) == ("those that were in a failed step run first, each alone", 0)
    harness.run()


def test_a_failure_of_nobody_alone_ends_too() -> None:
    """Each turn alone brings a token, so even steps that fail only in company get to their end."""
    harness = Harness(make_config(max_num_batched_tokens=64))
    for handle in range(3):
        harness.submit(make_spec(handle, [handle, *PROMPT], 4))
    harness.worker.fails = lambda names: len(names) > 1
    harness.run()
    for handle in range(3):
        assert harness.tokens(handle) == undisturbed([handle, *PROMPT], 1, 4)


def test_who_fails_alone_is_guilty_even_when_aborted_meanwhile() -> None:
    harness = Harness(make_config(max_num_batched_tokens=64))
    harness.worker.fails = lambda _: True
    harness.submit(make_spec(0, PROMPT))
    harness.plan()
    harness.abort(0)
    harness.worker.fails = lambda _: False
    harness.submit(make_spec(1, PROMPT, 3))
    harness.run()
    assert harness.heard[0, 0].finish == FINISH_ABORT
    assert harness.tokens(1) == undisturbed(PROMPT, 1, 3)


def test_a_skipped_step_is_undone() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 4))
    harness.plan()
    harness.outcomes.clear()
    harness.worker.rows.clear()
    empty = array("i")
    outcome = StepOutcome(harness.plans[-1].step_id, STEP_SKIPPED, None, empty, array("Q"), b"", empty, empty)
    assert harness.core.apply(outcome) == []
    harness.run()
    assert harness.plans[1].resync
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 4)


@pytest.mark.parametrize(("status", "words"), [(ROW_NOT_FINITE, "not finite"), (ROW_FAILED, "no result")])
def test_a_row_that_fails_fails_its_choice_alone(status: int, words: str) -> None:
    harness = Harness(make_config(max_num_batched_tokens=64))
    harness.submit(make_spec(0, PROMPT, 3))
    harness.submit(make_spec(1, PROMPT, 3, token=bytes.fromhex("ab" * 16)))
    harness.worker.statuses["r1"] = status
    harness.run()
    failed = harness.heard[1, 0].failed
    assert failed is not None
    assert (failed.failure.code, failed.failure.error_id) == (13, "abababababab-0")
    assert words in failed.failure.message
    assert "abababababab-0" in failed.failure.message
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 3)


def test_a_request_that_forbids_every_token_is_its_own_fault() -> None:
    harness = Harness(make_config(max_num_batched_tokens=64))
    harness.submit(make_spec(0, PROMPT, 3))
    harness.submit(make_spec(1, PROMPT, 3))
    harness.worker.statuses["r1"] = ROW_NO_TOKEN
    harness.run()
    failed = harness.heard[1, 0].failed
    assert failed is not None
    assert (failed.failure.code, failed.failure.error_id, failed.failure.field) == (3, None, "sampling")
    assert "allowed_token_ids" in failed.failure.message
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 3)


def test_a_row_that_was_dropped_runs_again() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 3))
    harness.worker.statuses["r0"] = ROW_DROPPED
    harness.turn()
    harness.turn()
    harness.worker.statuses.clear()
    harness.run()
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 3)


def test_a_row_without_an_answer_fails() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 3))
    while (plan := harness.core.schedule(0.0)) is not None and not plan.flags[0] & SAMPLES:
        harness.hear(harness.core.apply(harness.worker.execute(plan)))
    assert plan is not None
    empty = array("i")
    harness.hear(harness.core.apply(StepOutcome(plan.step_id, STEP_OK, None, empty, array("Q"), b"", empty, empty)))
    assert harness.heard[0, 0].failed is not None
    harness.run()


def test_answers_are_matched_by_epoch_in_whatever_order_they_come() -> None:
    harness = Harness(make_config(max_num_batched_tokens=64, steps_in_flight=1))
    for handle in range(3):
        harness.submit(make_spec(handle, [handle, *PROMPT], 4))
    while harness.plan() is not None:
        outcome = harness.outcomes.popleft()
        turned = replace(
            outcome,
            rows=outcome.rows[::-1],
            epochs=outcome.epochs[::-1],
            row_status=outcome.row_status[::-1],
            token_counts=outcome.token_counts[::-1],
            token_ids=outcome.token_ids[::-1],
        )
        harness.hear(harness.core.apply(turned))
    for handle in range(3):
        assert harness.tokens(handle) == undisturbed([handle, *PROMPT], 1, 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lost_worker_changes_no_output(depth: int) -> None:
    harness = Harness(make_config(steps_in_flight=depth))
    for handle in range(6):
        harness.submit(make_spec(handle, [handle, *PROMPT], 9, n=1 + handle % 2))
    for _ in range(5):
        for _ in range(4):
            harness.turn()
        harness.plan()
        harness.lose_worker()
        assert harness.core.steps_in_flight == 0
        assert harness.core.load().running == 0
        assert harness.core.kv.pool.num_indexed == 0
    harness.run()
    for handle in range(6):
        assert harness.tokens(handle) == undisturbed([handle, *PROMPT], 1, 9)
    assert harness.core.counters.preemptions == 0
    assert [heard.finish for heard in harness.heard.values()] == [FINISH_LENGTH] * 9


def test_an_outcome_from_before_the_loss_changes_nothing() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 3))
    harness.plan()
    late = harness.outcomes[0]
    harness.lose_worker()
    assert harness.core.apply(late) == []
    harness.plan()
    assert harness.core.apply(late) == []
    harness.run()
    assert harness.tokens(0) == undisturbed(PROMPT, 1, 3)


def test_resetting_the_prefix_cache() -> None:
    harness = Harness()
    harness.submit(make_spec(0, PROMPT, 1))
    harness.run()
    harness.submit(make_spec(1, [9, *PROMPT], 9))
    for _ in range(3):
        harness.turn()
    assert harness.core.reset_prefix_cache(preempt=False) == 2
    assert harness.core.kv.pool.num_indexed == 2
    assert harness.core.reset_prefix_cache(preempt=True) == 2
    harness.check()
    harness.run()
    assert harness.tokens(1) == undisturbed([9, *PROMPT], 1, 9)


# Looking in


def test_the_load_counts_what_runs_and_waits() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.submit(make_spec(0, PROMPT, 20))
    harness.submit(make_spec(1, PROMPT, n=2))
    harness.turn()
    load = harness.core.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 2, 18)
    assert load.running_tokens == 9
    assert (load.free_blocks, load.total_blocks) == (29, 32)
    harness.run()


def test_explanations() -> None:
    harness = Harness(make_config(max_num_seqs=1, num_blocks=8))
    for handle in range(3):
        harness.submit(make_spec(handle, PROMPT, 20, n=1 + handle, tenant="t"))
    for _ in range(3):
        harness.turn()
    first, second, third = (harness.core.explain(handle.to_bytes(16, "big")) for handle in range(3))
    assert first is not None
    assert (first.state, first.reason, first.position, first.prompt_tokens) == ("running", "runs on row 0", None, 9)
    assert (first.output_tokens, first.preemptions, first.tenant) == (len(harness.tokens(0)), 0, "t")
    assert second is not None
    assert (second.state, second.reason, second.position) == ("waiting", "all 1 places are taken by running choices", 0)
    assert third is not None
    assert (third.reason, third.position, third.computed_tokens) == ("1 choices stand before it in the line", 1, 0)
    harness.abort(1, 0)
    assert harness.core.explain(b"unknown") is None
    harness.run()
    assert harness.core.explain(bytes(16)) is None


def test_an_explanation_names_the_blocks_that_are_missing() -> None:
    harness = Harness(make_config(num_blocks=8))
    harness.submit(make_spec(0, PROMPT, 20))
    harness.turn()
    harness.submit(make_spec(1, [2] * 24, 4))
    harness.turn()
    explanation = harness.core.explain((1).to_bytes(16, "big"))
    assert explanation is not None
    assert explanation.reason.startswith("needs 6 KV blocks")
    harness.run()
    assert harness.heard[1, 0].finish != FINISH_NONE
