"""The worker had nothing to encode an item from: who reads it fails, and nobody takes it for encoded."""

from __future__ import annotations

from dataclasses import replace

from services.engine.plan import ROW_FAILED
from services.engine.request import MediaItem
from tests.engine.fake_worker import undisturbed
from tests.engine.harness import Harness, make_config, make_spec

PICTURE = MediaItem(b"p" * 32, "image", 2, 3, 3)


def a_harness() -> Harness:
    return Harness(make_config(max_num_batched_tokens=16, encoder_budget=10, encoder_cache_size=10))


def miss(harness: Harness, handle: int, told: tuple[bytes, ...] = (PICTURE.hash,)) -> None:
    """Applies the oldest step as one in which that request's row failed and these items were missing."""
    outcome = harness.outcomes.popleft()
    at = list(outcome.rows).index(
        next(row for row, held in harness.worker.rows.items() if held.new.request_id == f"r{handle}")
    )
    failed = bytearray(outcome.row_status)
    failed[at] = ROW_FAILED
    counts, ids = outcome.token_counts[:], outcome.token_ids[:]
    del ids[sum(counts[:at])]
    counts[at] = 0
    harness.outcomes.appendleft(
        replace(outcome, row_status=bytes(failed), token_counts=counts, token_ids=ids, missing_media=told)
    )
    harness.apply()


def test_the_request_fails_by_name_and_others_go_on() -> None:
    harness = a_harness()
    harness.submit(make_spec(1, [1, 2, 9, 9, 9, 3], media=(PICTURE,)))
    harness.submit(make_spec(2, [5, 6]))
    harness.plan()
    miss(harness, 1)
    failed = harness.heard[1, 0].failed
    assert failed is not None
    assert (failed.failure.code, failed.failure.reason) == (14, "MEDIA_MISSING")
    assert failed.failure.message == "the content of the image at prompt token 2 was not found by the worker"
    harness.run()
    assert harness.tokens(2) == undisturbed([5, 6], 1, 4)


def test_the_next_request_has_it_encoded_again() -> None:
    harness = a_harness()
    harness.submit(make_spec(1, [1, 2, 9, 9, 9, 3], media=(PICTURE,)))
    plan = harness.plan()
    assert plan is not None
    assert plan.encode == [PICTURE]
    miss(harness, 1)
    harness.submit(make_spec(2, [4, 2, 9, 9, 9, 3], media=(PICTURE,)))
    again = harness.plan()
    assert again is not None
    assert again.encode == [PICTURE]
    assert again.dropped_media == [PICTURE.hash], "the worker forgets what it may have of it first"
    harness.run()
    assert len(harness.tokens(2)) == 4


def test_what_is_missing_but_nowhere_is_passed_over() -> None:
    harness = a_harness()
    harness.submit(make_spec(1, [1, 2]))
    harness.plan()
    harness.outcomes[0] = replace(harness.outcomes[0], missing_media=(b"x" * 32,))
    harness.run()
    assert harness.tokens(1) == undisturbed([1, 2], 1, 4)


def test_who_was_planned_onto_the_item_before_it_was_known_to_be_missing_fails_by_name_too() -> None:
    harness = a_harness()
    harness.submit(make_spec(1, [1, 2, 9, 9, 9, 3], media=(PICTURE,)))
    harness.plan()
    harness.submit(make_spec(2, [4, 2, 9, 9, 9, 3], media=(PICTURE,)))
    second = harness.plan()
    assert second is not None
    assert second.encode == [], "the step before it encodes the item"
    miss(harness, 1)
    miss(harness, 2, told=())
    failed = harness.heard[2, 0].failed
    assert failed is not None
    assert failed.failure.reason == "MEDIA_MISSING"
    harness.submit(make_spec(3, [4, 2, 9, 9, 9, 3], media=(PICTURE,)))
    third = harness.plan()
    assert third is not None
    assert third.encode == [PICTURE]
    harness.run()
    assert len(harness.tokens(3)) == 4
