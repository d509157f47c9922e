"""However a choice's tokens are cut into pieces, its deltas joined are the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import TriptychError
from services.gateway.pipeline import ChoicePipeline
from services.gateway.request import ChoiceTokens, Delta, Finish, FinishReason, Position, TextOptions, TokenLogprob
from services.gateway.stops import StopMatcher
from tests.gateway import toys

EOS = 1


def positions(ids: Sequence[int]) -> tuple[Position, ...]:
    return tuple((TokenLogprob(token_id, -float(i), 1),) for i, token_id in enumerate(ids))


def run(
    ids: Sequence[int],
    finish: FinishReason,
    cuts: Sequence[int] = (),
    *,
    kind: str = "byte_level",
    options: TextOptions = TextOptions(),  # noqa: B008
    min_tokens: int = 0,
    needs_tokens: bool = False,
    takes: Sequence[bool] = (),
) -> tuple[list[Delta], ChoicePipeline]:
    """The deltas for tokens that come in pieces cut at `cuts`, taken after those pieces where `takes` says so."""
    matcher = StopMatcher(options.stop) if options.stop else None
    pipeline = ChoicePipeline(
        0, toys.vocabulary(kind), options, matcher=matcher, min_tokens=min_tokens, needs_tokens=needs_tokens
    )
    bounds = [0, *sorted(cuts), len(ids)]
    logprobs = positions(ids)
    deltas = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        last = end == len(ids) and i == len(bounds) - 2
        pipeline.push(
            ChoiceTokens(0, start, tuple(ids[start:end]), finish if last else FinishReason.NONE, logprobs[start:end])
        )
        if last or i >= len(takes) or takes[i]:
            delta = pipeline.take()
            if delta is not None:
                deltas.append(delta)
    return deltas, pipeline


def joined(
    deltas: Sequence[Delta],
) -> tuple[str, tuple[int, ...], tuple[Position, ...], Finish | None, tuple[str, ...]]:
    for before, after in itertools.pairwise(deltas):
        assert after.first_index == before.first_index + len(before.token_ids)
        assert before.finish is None
    return (
        "".join(delta.text for delta in deltas),
        sum((delta.token_ids for delta in deltas), ()),
        sum((delta.logprobs for delta in deltas), ()),
        deltas[-1].finish if deltas else None,
        sum((delta.texts for delta in deltas), ()),
    )


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "metaspace"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_cut_gives_the_same(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(toys.vocabulary(kind)) - 1), min_size=1, max_size=24))
    options = TextOptions(
        stop=tuple(data.draw(st.lists(st.text("abe <|🔥\ufffd", min_size=1, max_size=2), max_size=3))),
        include_stop=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    finish = data.draw(st.sampled_from([FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_ID]))
    min_tokens = data.draw(st.integers(0, 4))
    cuts = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8))
    takes = data.draw(st.lists(st.booleans(), max_size=8))
    needs = data.draw(st.booleans())
    deltas, pipeline = run(
        ids, finish, cuts, kind=kind, options=options, min_tokens=min_tokens, needs_tokens=needs, takes=takes
    )
    whole, _ = run(ids, finish, kind=kind, options=options, min_tokens=min_tokens)
    assert len(whole) == 1
    assert joined(deltas) == joined(whole)
    text, kept, logprobs, end, texts = joined(deltas)
    assert kept == tuple(ids[: len(kept)])
    assert logprobs == positions(ids)[: len(kept)]
    assert len(texts) == len(kept) == pipeline.kept_tokens
    assert "".join(texts) == text
    assert end is not None
    if end.reason is not FinishReason.STOP_STRING:
        silent = finish is FinishReason.EOS or (finish is FinishReason.STOP_ID and not options.include_stop)
        visible = ids[:-1] if silent else ids
        assert text == toys.tokenizer(kind).decode(visible, skip_special_tokens=options.skip_special_tokens)
        assert kept == tuple(ids)
    elif not options.include_stop:
        assert len(kept) >= min_tokens
        assert toys.tokenizer(kind).decode(ids, skip_special_tokens=options.skip_special_tokens).startswith(text[:-1])


def test_the_text_of_an_eos_id_is_left_out_and_its_id_counted() -> None:
    ids = (*toys.ids("byte_level", "the fox"), EOS)
    deltas, pipeline = run(ids, FinishReason.EOS, options=TextOptions(skip_special_tokens=False))
    assert joined(deltas)[:2] == ("the fox", ids)
    assert pipeline.finish == Finish(FinishReason.EOS)
    assert pipeline.kept_tokens == len(ids)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_id_is_named(include: bool) -> None:
    ids = toys.ids("byte_level", "the fox")
    deltas, pipeline = run(ids, FinishReason.STOP_ID, options=TextOptions(include_stop=include))
    shown = ids if include else ids[:-1]
    assert joined(deltas)[0] == toys.tokenizer("byte_level").decode(list(shown))
    assert pipeline.finish == Finish(FinishReason.STOP_ID, stop_token_id=ids[-1])


def test_tokens_after_a_stop_string_count_for_nothing() -> None:
    ids = toys.ids("byte_level", "the quick brown fox jumps")
    deltas, pipeline = run(ids, FinishReason.NONE, options=TextOptions(stop=("own fox",)))
    text, kept, logprobs, finish, _ = joined(deltas)
    assert text == "the quick br"
    assert finish == Finish(FinishReason.STOP_STRING, stop_string="own fox")
    assert toys.tokenizer("byte_level").decode(list(kept)) == "the quick brown fox"
    assert len(logprobs) == len(kept) == pipeline.kept_tokens < len(ids)
    pipeline.push(ChoiceTokens(0, len(ids), (5, 6), FinishReason.LENGTH))
    assert pipeline.kept_tokens == len(kept)


def test_a_stop_string_that_an_unfinished_character_completes() -> None:
    """A broken last character is text too, and what it completes ends the text before the EOS id."""
    first = toys.vocabulary("byte_level").pieces.index("ð")  # byte F0
    ids = (*toys.ids("byte_level", "the"), first, EOS)
    deltas, pipeline = run(ids, FinishReason.EOS, options=TextOptions(stop=("e\ufffd",)))
    assert joined(deltas)[0] == "th"
    assert pipeline.kept_tokens == len(ids) - 1


def test_no_delta_without_news() -> None:
    fire = toys.ids("byte_level", "🔥")
    deltas, _ = run(fire, FinishReason.NONE, range(1, len(fire)))
    assert [delta.text for delta in deltas] == ["🔥"]
    assert deltas[0].token_ids == fire
    quiet, _ = run((0, 0, 0), FinishReason.NONE, [1, 2])
    assert quiet == []
    told, _ = run((0, 0, 0), FinishReason.NONE, [1, 2], needs_tokens=True)
    assert [delta.token_ids for delta in told] == [(0,), (0,), (0,)]


def test_tokens_that_came_before_are_dropped_and_a_gap_is_an_error() -> None:
    ids = toys.ids("byte_level", "quietly a brown cat")
    pipeline = ChoicePipeline(0, toys.vocabulary("byte_level"), TextOptions())
    pipeline.push(ChoiceTokens(0, 0, ids[:3]))
    pipeline.push(ChoiceTokens(0, 1, ids[1:4]))
    pipeline.push(ChoiceTokens(0, 4, ids[4:], FinishReason.LENGTH))
    delta = pipeline.take()
    assert delta is not None
    assert delta.text == "quietly a brown cat"
    with pytest.raises(TriptychError, match="missing"):
        ChoicePipeline(0, toys.vocabulary("byte_level"), TextOptions()).push(ChoiceTokens(0, 2, ids))


def test_an_aborted_choice_may_end_without_tokens() -> None:
    deltas, _ = run((), FinishReason.ABORT)
    assert deltas == [Delta(0, 0, "", (), (), Finish(FinishReason.ABORT), ())]


def test_echo_stands_before_the_first_text() -> None:
    pipeline = ChoicePipeline(0, toys.vocabulary("byte_level"), TextOptions(stop=("the",)), echo="the prompt: ")
    ids = toys.ids("byte_level", "a fox")
    pipeline.push(ChoiceTokens(0, 0, ids[:2]))
    pipeline.push(ChoiceTokens(0, 2, ids[2:], FinishReason.LENGTH))
    delta = pipeline.take()
    assert delta is not None
    assert delta.text == "the prompt: a fox"
    assert "".join(delta.texts) == "a fox"
