"""Nothing holds the loop for long: large steps are taken in slices, large bodies are read beside it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

import pytest

from protos import common_pb2, engine_pb2
from services.common.errors import Unavailable
from services.gateway.inflight import EngineRequest, Turns
from services.gateway.request import (
    ChoiceTokens,
    EngineEvent,
    FinishReason,
    GenerateSpec,
    PromptLogprobs,
    SamplingParams,
)
from services.gateway.router import Router
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import gateway_stack

SLICE = 128


async def never(info: object) -> None:
    raise AssertionError(f"no engine should be found, not {info}")


def requests(router: Router, count: int) -> list[EngineRequest]:
    """Requests that run."""
    spec = GenerateSpec("r", "m", (1, 2), SamplingParams(10, 1, logprobs=1, prompt_logprobs=1))
    live = [EngineRequest(spec, handle, 0.0, lambda *_: None) for handle in range(1, count + 1)]
    router._live.update({request.handle: request for request in live})
    return live


def logprobs(counts: list[int]) -> common_pb2.Logprobs:
    """The entry `e` of position `p` is token p with log probability -e and rank e + 1."""
    entries = [(place, float(-entry), entry + 1) for place, count in enumerate(counts) for entry in range(count)]
    ids, values, ranks = zip(*entries, strict=True)
    return common_pb2.Logprobs(
        count_i32le=array("i", counts).tobytes(),
        token_id_i32le=array("i", ids).tobytes(),
        logprob_f32le=array("f", values).tobytes(),
        rank_i32le=array("i", ranks).tobytes(),
    )


async def turns_of_others(work: asyncio.Task[None]) -> int:
    """How often another task ran until the work was done."""
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    work.result()
    return turns


async def test_a_large_step_is_taken_in_slices() -> None:
    """With log probabilities, of which each row gets its own."""
    count = 1000
    router = Router("127.0.0.1:1", name="g", version="0", on_engine=never)
    live = requests(router, count)
    counts = [1 + place % 3 for place in range(count)]
    outputs = engine_pb2.StepOutputs(
        step_id=1,
        handle_u32le=array("I", range(1, count + 1)).tobytes(),
        choice_u32le=bytes(4 * count),
        first_index_u32le=bytes(4 * count),
        token_count_u32le=array("I", [1] * count).tobytes(),
        token_id_i32le=array("i", range(count)).tobytes(),
        finish_u8=bytes(count),
        logprobs=logprobs(counts),
    )
    assert await turns_of_others(asyncio.create_task(router._take_outputs(outputs))) >= count // SLICE
    for place, request in enumerate(live):
        (event,) = await request.receive()
        assert isinstance(event, ChoiceTokens)
        assert event.token_ids == (place,)
        assert [entry.rank for entry in event.logprobs[0]] == list(range(1, counts[place] + 1))
        assert event.logprobs[0][0].token_id == place
    await router.close()


async def test_log_probabilities_of_a_long_prompt_are_taken_in_slices() -> None:
    length = 4000
    router = Router("127.0.0.1:1", name="g", version="0", on_engine=never)
    (request,) = requests(router, 1)
    counts = [0] + [2] * (length - 1)
    piece = engine_pb2.PromptLogprobsOutput(handle=1, first_position=0, logprobs=logprobs(counts))
    outputs = engine_pb2.StepOutputs(step_id=1, prompt_logprobs=[piece, piece])
    assert await turns_of_others(asyncio.create_task(router._take_outputs(outputs))) >= 2 * length // SLICE
    places = []
    for event in await request.receive():
        assert isinstance(event, PromptLogprobs)
        assert event.first_position == len(places)
        places += event.positions
    assert [len(place) for place in places] == counts
    assert all(place[0].token_id == at for at, place in enumerate(places) if place)
    await router.close()


async def fed(
    count: int, take: Callable[[int, Sequence[EngineEvent]], bool]
) -> tuple[list[EngineRequest], list[asyncio.Task[None]]]:
    """Requests that share their turns, and the tasks in which each of them is fed."""
    turns = Turns()
    spec = GenerateSpec("r", "m", (1,), SamplingParams(10, 1))
    live = [EngineRequest(spec, number, 0.0, lambda *_: None, turns) for number in range(count)]
    tasks = [asyncio.create_task(request.feed(functools.partial(take, number))) for number, request in enumerate(live)]
    await asyncio.sleep(0)
    return live, tasks


def give(live: list[EngineRequest], step: int, finish: FinishReason = FinishReason.NONE) -> None:
    for request in live:
        request.take(0, step, array("i", [step]), finish, None)


async def test_who_waits_for_a_turn_gets_what_came_meanwhile_at_once() -> None:
    told: list[list[tuple[int, ...]]] = [[] for _ in range(100)]

    def take(number: int, events: Sequence[EngineEvent]) -> bool:
        told[number] += [event.token_ids for event in events if isinstance(event, ChoiceTokens)]
        return True

    live, tasks = await fed(100, take)
    for _ in range(20):
        await asyncio.sleep(0)
    give(live, 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    early = [number for number in range(100) if told[number]]
    assert 0 < len(early) < 100
    give(live, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert all(told[number] == ([(0,), (1,)] if number in early else [(0, 1)]) for number in range(100))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_reader_that_breaks_ends_alone() -> None:
    """So does one that has had enough, one whose request fails, and one whose engine stops short of the end."""
    told: list[int] = []
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report["exception"]))

    def take(number: int, events: Sequence[EngineEvent]) -> bool:
        told.append(number)
        if number == 1:
            raise ValueError("a bug")
        if not events:
            raise Unavailable("short")
        return number != 2

    live, tasks = await fed(5, take)
    give(live, 0)
    live[3].fail(Unavailable("lost"))
    live[4].abort()
    done = await asyncio.gather(*tasks[1:4], return_exceptions=True)
    assert told == [0, 1, 2, 3, 4, 4]
    assert [type(end) for end in done] == [ValueError, type(None), Unavailable]
    assert [type(report) for report in reports] == [ValueError]
    assert not tasks[0].done()
    tasks[0].cancel()
    with pytest.raises(Unavailable, match="short"):
        await tasks[4]
    give(live[:1], 1)  # to nobody
    assert [event.token_ids for event in await live[0].receive() if isinstance(event, ChoiceTokens)] == [(1,)]


@contextlib.contextmanager
def slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """CPU seconds of each callback of the loop; another thread's, and another process's, do not count."""
    took: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        took.append(time.thread_time() - begin)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield took


async def test_a_large_body_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 kB, of which this model makes 50,000 tokens: some 5 ms of work. The bound is ten times that."""
    gc.collect()  # what other tests left behind is not collected within a slice
    text = json.dumps({"messages": [{"role": "user", "content": "wave " * 10_000}], "max_tokens": 2})
    ids = json.dumps({"prompt": [65] * 50_000, "max_tokens": 2})
    async with gateway_stack(FakeEngine(context=1 << 17)) as s:
        for path, body in (("/v1/chat/completions", text), ("/v1/completions", ids)):
            with slices(monkeypatch) as took:
                answer = await s.http.post(path, content=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens"] >= 50_000
            assert max(took) < 0.05
