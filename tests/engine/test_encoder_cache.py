"""Encoder time and room: items whole, once, within both, and nobody waits for them on a row."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.engine.request import MediaItem, RequestSpec, choice_seed
from tests.engine.fake_worker import entries, undisturbed
from tests.engine.harness import Harness, make_config, make_spec


def item(name: str, offset: int, length: int, embeddings: int | None = None) -> MediaItem:
    return MediaItem(name.encode().ljust(32, b"."), "image", offset, length, embeddings or length)


def media_spec(handle: int, tokens: int, *items: MediaItem, max_tokens: int = 2, **given: Any) -> RequestSpec:
    """Prompts of different requests share nothing."""
    return make_spec(handle, [(handle + at) % 50 for at in range(tokens)], max_tokens, media=items, **given)


def make_harness(budget: int = 10, room: int = 20, **given: Any) -> Harness:
    values = {"max_num_batched_tokens": 16, "num_blocks": 64, "steps_in_flight": 1} | given
    return Harness(make_config(encoder_budget=budget, encoder_cache_size=room, **values))


def computed(harness: Harness) -> list[dict[int, int]]:
    """Tokens by handle of every step so far."""
    return [
        {entry[0].owner.handle: count for entry, count in zip(entries(plan), plan.num_tokens, strict=True)}
        for plan in harness.plans
    ]


def encoded(harness: Harness) -> list[list[str]]:
    """Names of the items that each step encoded."""
    return [[each.hash.rstrip(b".").decode() for each in plan.encode] for plan in harness.plans]


def in_order(steps: list[list[str]]) -> list[str]:
    return [name for step in steps for name in step]


def test_an_item_is_encoded_whole_by_the_first_step_that_reads_it() -> None:
    harness = make_harness(max_num_batched_tokens=6)
    harness.submit(media_spec(1, 14, item("a", 4, 9), max_tokens=1))
    harness.run()
    assert computed(harness) == [{1: 6}, {1: 6}, {1: 2}]
    assert encoded(harness) == [["a"], [], []]


def test_tokens_end_before_an_item_for_which_there_is_no_time() -> None:
    harness = make_harness(budget=10)
    harness.submit(media_spec(1, 16, item("a", 1, 6), item("b", 8, 7), max_tokens=1))
    harness.run()
    assert computed(harness) == [{1: 8}, {1: 8}]
    assert encoded(harness) == [["a"], ["b"]]


def test_who_waits_for_the_encoder_takes_no_place() -> None:
    harness = make_harness(budget=6, max_num_seqs=2)
    harness.submit(media_spec(1, 6, item("a", 0, 6)))
    harness.submit(media_spec(2, 6, item("b", 0, 6)))
    harness.submit(media_spec(3, 5))
    harness.plan()
    assert harness.running() == [1, 3]
    explanation = harness.core.explain(media_spec(2, 1).token)
    assert explanation is not None
    assert explanation.state == "waiting"
    harness.apply()
    harness.run()
    assert encoded(harness)[0] == ["a"]
    assert in_order(encoded(harness)) == ["a", "b"]


def test_text_before_the_item_gives_no_place_to_who_waits_for_the_encoder() -> None:
    harness = make_harness(budget=6, max_num_seqs=2, max_num_batched_tokens=30)
    harness.submit(media_spec(1, 9, item("a", 3, 6)))
    harness.submit(media_spec(2, 9, item("b", 3, 6)))
    harness.submit(media_spec(3, 5))
    harness.plan()
    assert harness.running() == [1, 3]
    harness.apply()
    harness.run()


def test_the_reason_names_the_encoder() -> None:
    harness = make_harness(budget=6, room=6)
    harness.submit(media_spec(1, 6, item("a", 0, 6)))
    harness.submit(media_spec(2, 6, item("b", 0, 6)))
    harness.plan()
    explanation = harness.core.explain(media_spec(2, 1).token)
    assert explanation is not None
    assert explanation.reason == (
        "waits for the encoder: its next item makes 6 embeddings; 6 of 6 are held by running requests"
    )
    harness.apply()
    harness.run()


def test_the_same_item_in_many_requests_is_encoded_once() -> None:
    harness = make_harness(budget=8, room=8)
    for handle in range(1, 5):
        harness.submit(media_spec(handle, 9, item("a", 1, 8)))
    harness.run()
    harness.submit(media_spec(5, 12, item("a", 3, 8)))
    harness.run()
    assert in_order(encoded(harness)) == ["a"]


def test_the_item_unused_for_longest_goes_when_room_is_wanted() -> None:
    harness = make_harness(budget=10, room=10)
    for handle, name in enumerate("ababcab", 1):
        harness.submit(media_spec(handle, 6, item(name, 1, 5)))
        harness.run()
    assert in_order(encoded(harness)) == ["a", "b", "c", "a", "b"]
    dropped = [name.rstrip(b".").decode() for plan in harness.plans for name in plan.dropped_media]
    assert dropped == ["a", "b", "c"]


def test_an_item_twice_in_one_prompt_is_encoded_once_where_its_room_is_not_wanted() -> None:
    harness = make_harness(budget=6, room=6, max_num_batched_tokens=4)
    harness.submit(media_spec(1, 13, item("a", 0, 6), item("a", 7, 6)))
    harness.submit(media_spec(2, 6, item("b", 0, 6)))
    harness.run()
    assert in_order(encoded(harness)) == ["a", "b"]


@pytest.mark.parametrize(
    ("media", "wrong"),
    [
        ((item("a", 0, 0, 1),), r"media\[0\] takes 0 tokens from 0 on"),
        ((item("a", 5, 4),), r"media\[0\] takes 4 tokens from 5 on; the prompt has 8"),
        ((item("a", 0, 4), item("b", 3, 2)), r"media\[1\] takes 2 tokens from 3 on; the prompt has 8, free from 4 on"),
        ((item("a", 0, 4, 5),), r"media\[0\] has 5 embeddings for 4 tokens"),
        (
            (item("a", 0, 4), item("a", 4, 4, 3)),
            r"media\[1\] has another size than an earlier item with its hash",
        ),
        ((item("a", 0, 7),), r"media\[0\] makes 7 embeddings; the encoder takes 6 at most"),
    ],
)
def test_media_that_cannot_be_served_are_refused_by_name(media: tuple[MediaItem, ...], wrong: str) -> None:
    harness = make_harness(budget=6, room=9)
    with pytest.raises(InvalidArgument, match=wrong) as caught:
        harness.submit(media_spec(1, 8, *media))
    assert caught.value.field == f"media[{len(media) - 1}]"
    assert not harness.core.has_work


def test_without_settings_no_item_that_fits_the_context_is_too_large() -> None:
    harness = Harness(make_config(num_blocks=32, max_num_batched_tokens=4))
    harness.submit(media_spec(1, 120, item("a", 0, 120)))
    harness.run()
    assert harness.tokens(1) == undisturbed(media_spec(1, 120).prompt, 1, 2)


def test_what_a_failed_step_was_to_encode_is_encoded_again() -> None:
    harness = make_harness(budget=10, steps_in_flight=2, max_num_batched_tokens=4)
    harness.submit(media_spec(1, 10, item("a", 1, 4), item("b", 6, 4)))
    failures = iter([False, True])
    harness.worker.fails = lambda _: next(failures, False)
    harness.run()
    assert harness.heard[1, 0].failed is not None or harness.tokens(1) == undisturbed(media_spec(1, 10).prompt, 1, 2)
    harness.submit(media_spec(2, 10, item("a", 1, 4), item("b", 6, 4)))
    harness.run()
    assert harness.tokens(2) == undisturbed(media_spec(2, 10).prompt, 1, 2)


class Once:
    """Lets the next step of several requests fail."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, names: list[str]) -> bool:
        fails = len(names) > 1 and not self.done
        self.done = self.done or fails
        return fails


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_storm_with_media_changes_no_output(seed: int) -> None:
    draw = random.Random(seed)
    room = draw.choice((6, 9, 20))
    budget = draw.choice((6, 8))
    harness = make_harness(
        budget,
        room,
        steps_in_flight=draw.choice((1, 2)),
        max_num_batched_tokens=draw.choice((3, 8, 30)),
        num_blocks=draw.choice((10, 16, 40)),
        max_num_seqs=draw.choice((1, 2, 4)),
        output_reserve_blocks=draw.choice((0, 1)),
    )
    specs: dict[int, RequestSpec] = {}
    for _ in range(draw.randint(1, 120)):
        dice = draw.random()
        if dice < 0.3:
            handle = len(specs)
            specs[handle] = random_media_spec(draw, handle)
            harness.submit(specs[handle])
        elif dice < 0.35 and specs:
            harness.abort(draw.choice(list(specs)))
        elif dice < 0.38:
            harness.lose_worker()
        elif dice < 0.42:
            harness.worker.fails = Once()
        elif dice < 0.7:
            harness.plan()
        elif harness.outcomes:
            harness.apply()
        assert harness.core.encoder.used <= room
    harness.run()
    assert max(harness.worker.encoded_per_step, default=0) <= budget
    assert sum(harness.worker.encoded.values()) <= room + budget  # what was dropped since is told with the next item
    for (handle, choice), heard in harness.heard.items():
        spec = specs[handle]
        right = undisturbed(spec.prompt, choice_seed(spec.seed, choice), spec.max_tokens)
        assert heard.tokens == right[: len(heard.tokens)]
        assert heard.finish == 5 or heard.tokens == right


def test_sizes_that_gateways_disagree_on_break_nothing() -> None:
    harness = make_harness(budget=10, room=10)
    for handle, (length, embeddings) in enumerate(((8, 8), (8, 1), (9, 9), (8, 2), (8, 8)), 1):
        harness.submit(media_spec(handle, 12, item("a", 1, length, embeddings), item(f"b{handle}", 10, 2)))
    harness.run()
    assert all(heard.finish for heard in harness.heard.values())


def random_media_spec(draw: random.Random, handle: int) -> RequestSpec:
    items, at = [], 0
    for _ in range(draw.randint(0, 3)):
        at += draw.randint(0, 3)
        length = draw.randint(1, 6)
        # A name stands for one size, as a hash does.
        items.append(item(f"{draw.randrange(4)}-{length}", at, length))
        at += length
    return media_spec(handle, at + draw.randint(1, 4), *items, max_tokens=draw.randint(1, 5), n=draw.choice((1, 1, 2)))
