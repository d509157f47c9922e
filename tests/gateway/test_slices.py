"""Nothing holds the loop for long: large steps are taken in slices, large bodies are read beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from collections.abc import Iterator

import pytest

from protos import common_pb2, engine_pb2
from services.gateway.inflight import EngineRequest
from services.gateway.request import ChoiceTokens, GenerateSpec, PromptLogprobs, SamplingParams
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
    text = json.dumps({"messages": [{"role": "user", "content": "wave " * 10_000}], "max_tokens": 2})
    ids = json.dumps({"prompt": [65] * 50_000, "max_tokens": 2})
    async with gateway_stack(FakeEngine(context=1 << 17)) as s:
        for path, body in (("/v1/chat/completions", text), ("/v1/completions", ids)):
            with slices(monkeypatch) as took:
                answer = await s.http.post(path, content=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens"] >= 50_000
            assert max(took) < 0.05
