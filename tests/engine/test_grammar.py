"""Requests under a grammar: who waits, what the masks say, and that no disturbance changes an output."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidArgument, Unimplemented
from services.engine.events import FINISH_ABORT, FINISH_EOS, FINISH_LENGTH, FINISH_NONE, FINISH_STOP_ID, Failed
from services.engine.plan import MASKED, SAMPLES
from services.engine.request import Replay, RequestSpec, choice_seed
from tests.engine.fake_grammar import ENDS, ParitySource, allowed_after, parity
from tests.engine.fake_worker import VOCABULARY, entries, undisturbed
from tests.engine.harness import Harness, make_config, make_spec


def make_harness(**given: Any) -> tuple[Harness, ParitySource]:
    source = ParitySource()
    return Harness(make_config(**given), grammars=source), source


def turn(harness: Harness) -> bool:
    """A turn of the loop, which asks for grammars that are done."""
    harness.hear(harness.core.take_grammars())
    return harness.turn()


def run(harness: Harness) -> None:
    while turn(harness):
        pass
    harness.run()


def held(handle: int, prompt: list[int], max_tokens: int = 12, **given: Any) -> RequestSpec:
    values: dict[str, Any] = {"constraint": parity(3, 6), "eos_ids": ENDS}
    return make_spec(handle, prompt, max_tokens, **(values | given))


def expected(spec: RequestSpec, choice: int = 0, *, refrain: bool = False) -> list[int]:
    constraint = spec.constraint
    ends = spec.eos_ids | spec.stop_ids
    if constraint is None:
        seed = choice_seed(spec.seed, choice)
        return undisturbed(spec.prompt, seed, spec.max_tokens, ends, spec.min_tokens, refrain)
    outputs = undisturbed(
        spec.prompt,
        choice_seed(spec.seed, choice),
        spec.max_tokens,
        frozenset(),
        refrain=refrain,
        allowed=lambda outputs: (
            None if ended(spec, outputs) else allowed_after(constraint, outputs, ends, spec.min_tokens)
        ),
    )
    for length in range(1, len(outputs)):
        if ended(spec, outputs[:length]):
            return outputs[:length]
    return outputs


def ended(spec: RequestSpec, outputs: list[int]) -> bool:
    """The last output is an end that counts: past min_tokens, or nothing else was allowed in its place."""
    constraint, ends = spec.constraint, spec.eos_ids | spec.stop_ids
    if constraint is None or not outputs or outputs[-1] not in ends:
        return False
    before = allowed_after(constraint, outputs[:-1], ends, spec.min_tokens)
    without = allowed_after(constraint, outputs[:-1], frozenset(), 0)
    return outputs[-1] in before and (len(outputs) > spec.min_tokens or not without)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_one_that_the_grammar_allows(depth: int, seed: int) -> None:
    harness, _ = make_harness(steps_in_flight=depth)
    spec = held(1, [1, 2, 3], seed=seed)
    harness.submit(spec)
    run(harness)
    tokens = harness.tokens(1)
    assert tokens == expected(spec)
    assert tokens[-1] in ENDS
    assert 3 <= len(tokens) - 1 <= 6
    assert all(token % 2 == at % 2 for at, token in enumerate(tokens[:-1]))
    assert harness.heard[1, 0].finish == FINISH_EOS


def test_rows_that_sample_are_flagged_and_two_steps_stay_in_flight() -> None:
    harness, _ = make_harness(max_num_batched_tokens=3)
    harness.submit(held(1, [1, 2, 3, 4, 5], 12, constraint=parity(12, 12)))
    harness.submit(make_spec(2, [1], 12))
    harness.hear(harness.core.take_grammars())
    harness.turn()
    harness.plan()
    assert harness.core.steps_in_flight == 2
    run(harness)
    masked = 0
    for plan in harness.plans:
        for (request, _, _, samples), flags in zip(entries(plan), plan.flags, strict=True):
            is_held = request.owner.handle == 1
            assert bool(flags & MASKED) == (is_held and samples)
            assert bool(flags & SAMPLES) == samples
            masked += is_held and samples
    assert masked >= 12


def test_masks_of_a_step_come_once_and_only_when_it_is_the_oldest() -> None:
    harness, _ = make_harness()
    harness.submit(held(1, [1, 2, 3]))
    harness.core.take_grammars()
    first = harness.core.schedule(1.0)
    masks = harness.core.fill_masks()
    assert first is not None
    assert masks is not None
    assert masks.step_id == first.step_id
    assert harness.core.fill_masks() is None
    second = harness.core.schedule(1.0)
    assert second is not None
    assert harness.core.fill_masks() is None, "the token before it is not known"
    harness.hear(harness.core.apply(harness.worker.execute(first, masks)))
    later = harness.core.fill_masks()
    assert later is not None
    assert later.step_id == second.step_id
    assert later.masks != masks.masks


def test_a_request_waits_for_its_grammar_in_nobodys_way() -> None:
    harness, source = make_harness(max_num_seqs=1)
    source.busy = True
    harness.submit(held(1, [1, 2, 3]))
    for handle in range(2, 60):
        harness.submit(make_spec(handle, [handle % 50], 1))
    explanation = harness.core.explain((1).to_bytes(16, "big"))
    assert explanation is not None
    assert explanation.state == "waiting"
    assert "grammar" in explanation.reason
    while turn(harness):
        pass
    assert harness.core.load().waiting == 1
    assert all(harness.heard[handle, 0].ended for handle in range(2, 60))
    source.busy = False
    run(harness)
    assert harness.tokens(1) == expected(held(1, [1, 2, 3]))


def test_a_grammar_that_cannot_be_used_fails_its_request_only() -> None:
    harness, _ = make_harness()
    harness.submit(held(1, [1, 2], n=2, constraint=parity(0, 0).__class__("regex", "bad")))
    harness.submit(held(2, [1, 2]))
    events = harness.core.take_grammars()
    harness.hear(events)
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.owner.handle == 1
    assert failed.choice is None
    assert failed.failure.code == InvalidArgument("").code_number
    assert failed.failure.message == "constraint: no such grammar"
    run(harness)
    assert harness.tokens(1) == []
    assert harness.tokens(2) == expected(held(2, [1, 2]))


def test_a_matcher_that_breaks_fails_its_request_only() -> None:
    harness, source = make_harness()
    for handle in (1, 2):
        harness.submit(held(handle, [1, 2]))
    turn(harness)
    harness.turn()
    source.matchers[0].error = "too complex"
    run(harness)
    failed = harness.heard[1, 0].failed
    assert failed is not None
    assert failed.failure.message == "constraint: too complex"
    assert failed.failure.code == InvalidArgument("").code_number
    assert harness.tokens(2) == expected(held(2, [1, 2]))


def test_an_abort_while_the_grammar_compiles_gives_it_up() -> None:
    harness, source = make_harness()
    source.busy = True
    harness.submit(held(1, [1, 2], n=2))
    harness.submit(held(2, [1, 2], n=2))
    harness.abort(1)
    harness.abort(2, 0)
    assert [each.cancelled for each in source.started] == [True, False]
    source.busy = False
    run(harness)
    assert harness.heard[1, 0].finish == FINISH_ABORT
    assert harness.tokens(2, 0) == []
    assert harness.tokens(2, 1) == expected(held(2, [1, 2]), 1)


def test_each_choice_is_held_for_itself() -> None:
    harness, _ = make_harness()
    spec = held(1, [4, 4, 4], n=3)
    harness.submit(spec)
    run(harness)
    tokens = [harness.tokens(1, choice) for choice in range(3)]
    assert tokens == [expected(spec, choice) for choice in range(3)]
    assert len({tuple(each) for each in tokens}) == 3


@pytest.mark.parametrize("seed", range(4))
def test_the_constraint_begins_after_its_ids(seed: int) -> None:
    spec = held(1, [1, 2, 3], 200, seed=seed, constraint=parity(2, 3, (7,)))
    harness, _ = make_harness(num_blocks=100)
    harness.submit(spec)
    run(harness)
    assert harness.tokens(1) == expected(spec)


def test_min_tokens_holds_the_end_back_until_nothing_else_may_follow() -> None:
    harness, _ = make_harness()
    spec = held(1, [1, 2, 3], 30, min_tokens=20, constraint=parity(1, 5))
    harness.submit(spec)
    run(harness)
    assert harness.tokens(1) == expected(spec)
    assert len(harness.tokens(1)) == 6
    assert harness.heard[1, 0].finish == FINISH_EOS


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("least", "min_tokens", "length"), [(5, 20, 6), (1, 20, 6), (5, 3, 4), (5, 0, 2), (1, 1, 2)])
def test_a_stop_id_that_the_grammar_needs_is_text_until_min_tokens(
    least: int, min_tokens: int, length: int, depth: int
) -> None:
    """Every other token must be a stop id: it ends the output, inside the grammar too, from min_tokens on."""
    harness, _ = make_harness(steps_in_flight=depth)
    odd = frozenset(range(1, VOCABULARY, 2)) - ENDS
    spec = held(1, [1, 2, 3], 30, min_tokens=min_tokens, stop_ids=odd, constraint=parity(least, 5))
    harness.submit(spec)
    run(harness)
    tokens = harness.tokens(1)
    assert tokens == expected(spec)
    assert len(tokens) == length
    assert harness.heard[1, 0].finish == (FINISH_EOS if tokens[-1] in ENDS else FINISH_STOP_ID)


def test_a_stop_id_ends_where_the_grammar_may() -> None:
    harness, _ = make_harness()
    spec = held(1, [1, 2, 3], 30, eos_ids=frozenset(), stop_ids=ENDS)
    harness.submit(spec)
    run(harness)
    assert harness.tokens(1) == expected(spec)


def test_the_longest_output_ends_inside_the_grammar() -> None:
    harness, _ = make_harness()
    harness.submit(held(1, [1], 4, constraint=parity(50, 50)))
    run(harness)
    assert harness.heard[1, 0].finish == FINISH_LENGTH
    assert len(harness.tokens(1)) == 4


def test_what_could_never_end_is_refused() -> None:
    harness, _ = make_harness()
    with pytest.raises(InvalidArgument, match="EOS") as refused:
        harness.submit(held(1, [1], eos_ids=frozenset()))
    assert refused.value.field == "constraint"
    assert not harness.core.has_work


def test_an_engine_without_grammars_refuses_them() -> None:
    harness = Harness(make_config())
    with pytest.raises(Unimplemented) as refused:
        harness.submit(held(1, [1]))
    assert refused.value.field == "constraint"
    assert not harness.core.has_work


def test_a_replay_goes_on_where_it_was() -> None:
    spec = held(1, [1, 2, 3], 30, constraint=parity(9, 9))
    full = expected(spec)
    for length in range(len(full)):
        harness, _ = make_harness()
        harness.submit(held(1, [1, 2, 3], 30, constraint=spec.constraint, replay=(Replay(array("i", full[:length])),)))
        run(harness)
        assert harness.tokens(1) == full


@pytest.mark.parametrize("finish", [FINISH_EOS, FINISH_NONE])
def test_a_replay_may_bring_choices_that_have_ended(finish: int) -> None:
    """By an id that is no part of the grammar; whether the gateway has been told why does not matter."""
    spec = held(1, [1, 2, 3], 30, n=2)
    first, second = expected(spec), expected(spec, 1)
    assert first[-1] in ENDS
    harness, _ = make_harness()
    replay = (Replay(array("i", first), finish), Replay(array("i", second[:2])))
    harness.submit(held(1, [1, 2, 3], 30, n=2, replay=replay))
    run(harness)
    assert harness.tokens(1, 1) == second
    assert harness.heard[1, 1].finish == FINISH_EOS


def test_a_preempted_row_in_flight_is_dropped() -> None:
    harness, _ = make_harness()
    spec = held(1, [1, 2, 3], 12, constraint=parity(12, 12))
    harness.submit(spec)
    harness.hear(harness.core.take_grammars())
    first = harness.core.schedule(1.0)
    second = harness.core.schedule(1.0)
    assert first is not None
    assert second is not None
    masks = harness.core.fill_masks()
    harness.core.preempt_all()
    harness.core.apply(harness.worker.execute(first, masks))
    dropped = harness.core.fill_masks()
    assert dropped is not None
    assert dropped.drop == b"\x01"
    assert dropped.masks == b""
    harness.core.apply(harness.worker.execute(second, dropped))
    run(harness)
    assert harness.tokens(1) == expected(spec)


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_cut_to_what_the_grammar_allows(drafts: int, depth: int) -> None:
    harness, _ = make_harness(
        num_speculative_tokens=drafts, max_speculative_tokens=5, steps_in_flight=depth, max_num_batched_tokens=40
    )
    harness.worker.refrain = True
    spec = held(1, [0, 1, 2] * 4, 40, constraint=parity(30, 35))
    harness.submit(spec)
    run(harness)
    assert harness.tokens(1) == expected(spec, refrain=True)
    assert bool(harness.core.counters.draft_tokens_accepted) == bool(drafts)


def random_spec(draw: random.Random, handle: int) -> RequestSpec:
    least = draw.randint(0, 6)
    starts_after = draw.choice(((), (), (1,), (0, 1)))
    return held(
        handle,
        [draw.randrange(3) for _ in range(draw.randint(1, 12))],
        draw.randint(1, 14),
        n=draw.choice((1, 1, 2)),
        seed=draw.randrange(4),
        min_tokens=draw.choice((0, 0, 3, 9)),
        constraint=draw.choice((None, parity(least, least + draw.randint(0, 4), starts_after))),
        num_speculative_tokens=draw.choice((None, 0, 2)),
    )


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 120))
def test_a_storm_changes_no_output_under_a_grammar(depth: int, seed: int, length: int) -> None:
    draw = random.Random(seed)
    harness, source = make_harness(
        max_num_batched_tokens=draw.choice((2, 8, 40)),
        max_num_seqs=draw.choice((1, 2, 4)),
        max_model_len=40,
        num_blocks=draw.randint(10, 16),
        steps_in_flight=depth,
        num_speculative_tokens=draw.choice((0, 3)),
        max_speculative_tokens=5,
    )
    harness.worker.refrain = draw.random() < 0.5
    specs: dict[int, RequestSpec] = {}
    for _ in range(length):
        dice = draw.random()
        if dice < 0.25:
            handle = len(specs)
            specs[handle] = random_spec(draw, handle)
            harness.submit(specs[handle])
        elif dice < 0.3:
            source.busy = not source.busy
        elif dice < 0.33:
            harness.lose_worker()
        elif dice < 0.37:
            harness.core.preempt_all()
        elif dice < 0.5:
            harness.hear(harness.core.take_grammars())
        elif dice < 0.75:
            harness.plan()
        elif harness.outcomes:
            harness.apply()
    source.busy = False
    run(harness)
    for (handle, choice), heard in harness.heard.items():
        assert heard.failed is None
        assert heard.tokens == expected(specs[handle], choice, refrain=harness.worker.refrain)
