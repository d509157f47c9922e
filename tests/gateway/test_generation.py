"""A request over a scripted engine: deltas, merging, aborts and usage."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import TriptychError, Unavailable
from services.gateway.generation import Generation
from services.gateway.request import (
    ChoiceTokens,
    Delta,
    EngineEvent,
    Finish,
    FinishReason,
    GenerateSpec,
    PromptLogprobs,
    RequestStarted,
    ResponseOptions,
    SamplingParams,
    TextOptions,
    TokenLogprob,
)
from tests.gateway import toys

TEXT = "the quick brown fox jumps"
IDS = toys.ids("byte_level", TEXT)


class Script:
    """Gives batches of events in order; an exception is raised; at the end it waits for ever."""

    def __init__(self, *batches: Sequence[EngineEvent] | TriptychError) -> None:
        self.batches = list(batches)
        self.ended = False
        self.aborts: list[tuple[int | None, FinishReason, int | None]] = []

    async def receive(self) -> Sequence[EngineEvent]:
        await asyncio.sleep(0)
        if not self.batches:
            await asyncio.Event().wait()
        batch = self.batches.pop(0)
        if isinstance(batch, TriptychError):
            self.ended = True
            raise batch
        return batch

    async def feed(self, take: Callable[[Sequence[EngineEvent]], bool]) -> None:
        while take(await self.receive()):
            pass

    def abort(self, choice: int | None, reason: FinishReason, kept_tokens: int | None) -> None:
        if not self.ended:
            self.aborts.append((choice, reason, kept_tokens))


def spec(n: int = 1, stop: tuple[str, ...] = ()) -> GenerateSpec:
    return GenerateSpec("r", "toy", (5, 6, 7), SamplingParams(100, 1, n=n), TextOptions(stop=stop))


def generation(script: Script, n: int = 1, stop: tuple[str, ...] = (), echo: str = "") -> Generation:
    return Generation(spec(n, stop), toys.vocabulary("byte_level"), script, echo=echo)


async def told(running: Generation) -> list[Delta]:
    """All deltas in order."""
    deltas: list[Delta] = []
    while news := await running.read():
        assert len({delta.choice for delta in news}) == len(news)
        deltas += news
    return deltas


def tokens(start: int, end: int, *, choice: int = 0, finish: FinishReason = FinishReason.NONE) -> ChoiceTokens:
    return ChoiceTokens(choice, start, IDS[start:end], finish)


LENGTH = FinishReason.LENGTH


async def test_a_request_that_ends_by_itself_is_never_aborted() -> None:
    script = Script(
        [RequestStarted(2)], [tokens(0, 2)], [tokens(2, len(IDS), finish=LENGTH)], Unavailable("not read any more")
    )
    running = generation(script)
    deltas = await told(running)
    running.close()
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1].finish == Finish(LENGTH)
    assert script.aborts == []
    assert (running.usage.prompt_tokens, running.usage.completion_tokens, running.usage.cached_tokens) == (
        3,
        len(IDS),
        2,
    )


async def test_events_that_queued_up_are_merged_per_choice() -> None:
    script = Script(
        [tokens(0, 1), tokens(0, 2, choice=1), tokens(1, 3), tokens(2, len(IDS), choice=1, finish=LENGTH)],
        [tokens(3, len(IDS), finish=LENGTH)],
    )
    deltas = await told(generation(script, n=2))
    assert [(delta.choice, delta.first_index) for delta in deltas] == [(0, 0), (1, 0), (0, 3)]
    assert deltas[1].text == TEXT


async def test_a_stop_string_aborts_its_choice_and_only_that() -> None:
    script = Script(
        [tokens(0, len(IDS) - 1), tokens(0, 3, choice=1)],
        [tokens(len(IDS) - 1, len(IDS)), tokens(3, len(IDS), choice=1, finish=LENGTH)],
    )
    running = generation(script, n=2, stop=("own fox",))
    deltas = await told(running)
    kept = next(delta for delta in deltas if delta.choice == 0 and delta.finish)
    assert kept.finish == Finish(FinishReason.STOP_STRING, stop_string="own fox")
    assert script.aborts == [(0, FinishReason.STOP_STRING, len(kept.token_ids))]
    assert sum(1 for delta in deltas if delta.finish) == 2
    assert running.usage.completion_tokens == 2 * len(kept.token_ids)


async def test_no_abort_where_the_engine_ended_with_the_same_tokens() -> None:
    script = Script([tokens(0, len(IDS), finish=LENGTH)])
    deltas = await generation(script, stop=("fox",)).whole()
    assert deltas[0].finish == Finish(FinishReason.STOP_STRING, stop_string="fox")
    assert script.aborts == []


async def test_a_reader_that_leaves_aborts_what_runs() -> None:
    script = Script([tokens(0, 2), tokens(0, len(IDS), choice=1, finish=LENGTH)])
    running = generation(script, n=2)
    await running.read()
    running.close()
    running.close()
    assert script.aborts == [(0, FinishReason.ABORT, 2)]


async def test_close_before_the_first_event_aborts() -> None:
    script = Script()
    generation(script).close()
    assert script.aborts == [(None, FinishReason.ABORT, None)]


async def test_a_failure_reaches_the_reader_after_what_came_before_and_needs_no_abort() -> None:
    script = Script([tokens(0, 2)], Unavailable("the engine is gone"))
    running = generation(script)
    assert [delta.token_ids for delta in await running.read()] == [IDS[:2]]
    with pytest.raises(Unavailable):
        await running.read()
    running.close()
    assert script.aborts == []


async def test_events_that_end_early_are_an_internal_error() -> None:
    with pytest.raises(TriptychError, match="ended before"):
        await generation(Script([])).whole()


async def test_prompt_logprobs_are_kept_once() -> None:
    first, second, third = ((), (TokenLogprob(6, -1.0, 1),), (TokenLogprob(7, -2.0, 1),))
    script = Script(
        [PromptLogprobs(0, (first, second))], [PromptLogprobs(1, (second, third))], [tokens(0, 4, finish=LENGTH)]
    )
    running = generation(script)
    await running.whole()
    assert running.prompt_logprobs == [first, second, third]


async def test_echo_comes_once_per_choice() -> None:
    script = Script([tokens(0, 2), tokens(0, 3, choice=1, finish=LENGTH)], [tokens(2, len(IDS), finish=LENGTH)])
    deltas = await told(generation(script, n=2, echo="> "))
    assert "".join(delta.text for delta in deltas if delta.choice == 0) == "> " + TEXT
    assert deltas[1].text.startswith("> the")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.integers(1, 6), st.sampled_from([(), ("fox",)]))
def test_an_interval_is_the_fewest_tokens_between_the_first_and_the_last(
    sizes: list[int], interval: int, stop: tuple[str, ...]
) -> None:
    bounds = [min(end, len(IDS)) for end in itertools.accumulate(sizes, initial=0)]
    pieces = [[tokens(start, end)] for start, end in itertools.pairwise(bounds) if end > start]
    script = Script(*pieces, [tokens(bounds[-1], len(IDS), finish=LENGTH)])
    seen: list[int] = []
    shown = ResponseOptions(stream_interval=interval)
    running = Generation(spec(1, stop), toys.vocabulary("byte_level"), script, shown=shown, on_tokens=seen.append)
    deltas = asyncio.run(told(running))
    assert all(len(delta.token_ids) >= interval for delta in deltas[1:-1])
    if not stop:  # a stop string holds the first tokens back where they may begin it
        assert len(deltas[0].token_ids) == len(pieces[0][0].token_ids)
    assert deltas[-1].finish is not None
    assert "".join(delta.text for delta in deltas) == (TEXT.split("fox", maxsplit=1)[0] if stop else TEXT)
    assert sum(seen) <= len(IDS)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streaming_joined_is_the_whole(data: st.DataObject) -> None:
    stop = tuple(data.draw(st.lists(st.sampled_from(["fox", "own fox", "k b", "zzz", "e"]), max_size=2)))
    events: list[ChoiceTokens] = []
    for choice in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(1, len(IDS) - 1), max_size=6)))
        bounds = [0, *cuts, len(IDS)]
        for start, end in itertools.pairwise(bounds):
            finish = LENGTH if end == len(IDS) else FinishReason.NONE
            events.append(tokens(start, end, choice=choice, finish=finish))
    events.sort(key=lambda event: event.first_index)
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=len(events), max_size=len(events)))
    batches, rest = [], events
    for size in sizes:
        if rest:
            batches.append(rest[:size])
            rest = rest[size:]

    async def both() -> None:
        streamed = await told(generation(Script(*batches), n=2, stop=stop))
        whole = await generation(Script(events), n=2, stop=stop).whole()
        given: list[Delta] = []
        running = generation(Script(*batches), n=2, stop=stop)
        while not running.over:  # it wants one batch at a time, then goes on
            await running.feed(lambda deltas: given.extend(deltas) or False)  # type: ignore[func-returns-value]
        assert given == streamed
        for choice in range(2):
            parts = [delta for delta in streamed if delta.choice == choice]
            assert "".join(delta.text for delta in parts) == whole[choice].text
            assert sum((delta.token_ids for delta in parts), ()) == whole[choice].token_ids
            assert [delta.finish for delta in parts if delta.finish] == [whole[choice].finish]

    asyncio.run(both())
