"""The router against an engine over real gRPC: any start order, merging, aborts, loss and replay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protos import common_pb2, engine_pb2
from services.common.errors import ResourceExhausted, TriptychError, Unavailable
from services.gateway.inflight import EngineRequest
from services.gateway.request import (
    ChoiceTokens,
    EngineEvent,
    FinishReason,
    GenerateSpec,
    RequestStarted,
    SamplingParams,
)
from services.gateway.router import Router
from services.gateway.wire import EngineInfo
from tests.gateway.fake_engine import END, FakeEngine, until


def spec(**sampling: object) -> GenerateSpec:
    values: dict[str, object] = {"max_tokens": 100, "seed": 1, "eos_token_ids": (END,), **sampling}
    return GenerateSpec("client-id", "bytes", (1, 2, 3), SamplingParams(**values))  # type: ignore[arg-type]


class Stack:
    def __init__(self, engine: FakeEngine, router: Router, infos: list[EngineInfo]) -> None:
        self.engine, self.router, self.infos = engine, router, infos

    async def attached(self) -> None:
        await until(lambda: self.router.attached)


@contextlib.asynccontextmanager
async def stack(engine: FakeEngine | None = None, *, budget_s: float = 20.0) -> AsyncIterator[Stack]:
    engine = engine or FakeEngine()
    await engine.start()
    infos: list[EngineInfo] = []

    async def on_engine(info: EngineInfo) -> None:
        infos.append(info)

    router = Router(engine.address, name="g", version="0", on_engine=on_engine, replay_budget_s=budget_s)
    task = asyncio.create_task(router.run())
    result = Stack(engine, router, infos)
    try:
        await result.attached()
        yield result
    finally:
        task.cancel()
        await router.close()
        await engine.kill()


async def events_of(request: EngineRequest) -> AsyncIterator[EngineEvent]:
    while events := await request.receive():
        for event in events:
            yield event


async def read(request: EngineRequest) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    ids: dict[int, list[int]] = {}
    finishes: dict[int, FinishReason] = {}
    async for event in events_of(request):
        if isinstance(event, ChoiceTokens):
            mine = ids.setdefault(event.choice, [])
            assert event.first_index == len(mine)
            mine += event.token_ids
            if event.finish:
                finishes[event.choice] = event.finish
    return ids, finishes


async def test_a_request_gives_its_tokens_and_ends_without_an_abort() -> None:
    async with stack() as s:
        request = s.router.submit(spec())
        events = [event async for event in events_of(request)]
        assert isinstance(events[0], RequestStarted)
        tokens = [event for event in events if isinstance(event, ChoiceTokens)]
        assert [token for event in tokens for token in event.token_ids] == [*b"hello world", END]
        assert tokens[-1].finish is FinishReason.EOS
        assert s.router.live == 0
        assert s.engine.aborts == []


async def test_the_submit_says_everything() -> None:
    async with stack() as s:
        params = SamplingParams(
            max_tokens=5, seed=2**63 + 1, n=2, stop_token_ids=(7,), temperature=0.0, top_k=3, logit_bias=((4, -1.5),),
            allowed_token_ids=(1, 2), banned_sequences=((1, 2), (3,)), logprobs=0,
            num_speculative_tokens=0,
        )  # fmt: skip
        full = GenerateSpec(
            "c", "bytes", (5, 2**20), params, priority=-2, cache_salt="s", deadline_ms=5000, traceparent="00-x"
        )
        await read(s.router.submit(full))
        (submit,) = s.engine.submits
        assert submit.prompt_id_i32le == (5).to_bytes(4, "little") + (2**20).to_bytes(4, "little")
        assert len(submit.token) == 16
        assert (submit.priority, submit.cache_salt, submit.traceparent) == (-2, "s", "00-x")
        assert 4000 < submit.deadline_ms <= 5000
        got = submit.sampling
        assert (got.n, got.max_tokens, got.seed, got.top_k) == (2, 5, 2**63 + 1, 3)
        assert got.HasField("temperature")
        assert got.temperature == 0.0
        assert got.HasField("logprobs")
        assert got.logprobs == 0
        assert not got.HasField("prompt_logprobs")
        assert got.HasField("num_speculative_tokens")
        assert got.num_speculative_tokens == 0
        assert [list(ids.ids) for ids in got.banned_sequences] == [[1, 2], [3]]
        assert submit.replay == []


async def test_two_requests_of_one_client_id_do_not_mix() -> None:
    script = {1: b"first", 2: b"second"}
    engine = FakeEngine(script=lambda submit, choice: list(script[submit.prompt_id_i32le[0]]))
    async with stack(engine) as s:
        params = SamplingParams(max_tokens=50, seed=1, eos_token_ids=(END,))
        one, two = (s.router.submit(GenerateSpec("same", "bytes", (first,), params)) for first in (1, 2))
        (ids_one, _), (ids_two, _) = await asyncio.gather(read(one), read(two))
        assert bytes(ids_one[0][:-1]) == b"first"
        assert bytes(ids_two[0][:-1]) == b"second"
        assert one.token != two.token


async def test_a_slow_reader_gets_one_merged_event_per_choice() -> None:
    async with stack() as s:
        request = s.router.submit(spec(n=2, logprobs=0))
        await until(lambda: not request.live)
        events = [event async for event in events_of(request) if isinstance(event, ChoiceTokens)]
        assert [(event.choice, len(event.token_ids), len(event.logprobs)) for event in events] == [
            (0, 12, 12),
            (1, 12, 12),
        ]


async def test_a_thousand_requests_send_no_abort() -> None:
    async with stack(FakeEngine(script=lambda *_: [65], per_step=2)) as s:
        requests = [s.router.submit(spec()) for _ in range(1000)]
        answers = await asyncio.gather(*(read(request) for request in requests))
        assert all(ids == {0: [65, END]} for ids, _ in answers)
        assert s.engine.aborts == []
        assert s.router.live == 0


async def test_an_abort_reaches_the_engine_and_ends_the_iterator() -> None:
    async with stack(FakeEngine(script=lambda *_: [65] * 90, step_s=0.005)) as s:
        request = s.router.submit(spec())
        await until(lambda: s.engine.step_number > 1)
        request.abort()
        _, finishes = await read(request)
        assert finishes == {0: FinishReason.ABORT}
        await until(lambda: not s.engine.live)
        assert [abort.reason for abort in s.engine.aborts] == [common_pb2.FINISH_REASON_ABORT]
        request.abort()
        assert len(s.engine.aborts) == 1


async def test_one_choice_ends_and_the_other_goes_on() -> None:
    async with stack(FakeEngine(held=True)) as s:
        request = s.router.submit(spec(n=2))
        request.abort(1, FinishReason.STOP_STRING, 3)
        s.engine.held = False
        _, finishes = await read(request)
        assert finishes == {0: FinishReason.EOS, 1: FinishReason.STOP_STRING}
        (abort,) = s.engine.aborts
        assert (abort.choice, abort.reason, abort.kept_tokens) == (1, common_pb2.FINISH_REASON_STOP_STRING, 3)


async def test_a_refused_request_raises_what_the_engine_said() -> None:
    refusal = common_pb2.Failure(code=8, message="queue is full", reason="QUEUE_FULL", retry_after_ms=700)
    async with stack(FakeEngine(refuse=refusal)) as s:
        request = s.router.submit(spec())
        with pytest.raises(ResourceExhausted, match="queue is full") as caught:
            await request.receive()
        assert (caught.value.reason, caught.value.retry_after_ms) == ("QUEUE_FULL", 700)
        assert s.router.live == 0


async def test_a_failure_comes_after_the_tokens_before_it() -> None:
    """Below the transport."""
    async with stack(FakeEngine(held=True)) as s:
        request = s.router.submit(spec())
        await until(lambda: s.engine.live)
        s.engine.step()
        s.engine.send(
            engine_pb2.AttachResponse(
                failed=engine_pb2.Failed(handle=request.handle, failure=common_pb2.Failure(code=13, message="boom"))
            )
        )
        events: list[object] = []
        with pytest.raises(TriptychError, match="boom"):
            events += [event async for event in events_of(request)]
        assert s.engine.aborts == []


async def test_an_engine_that_dies_in_the_middle_is_not_noticed() -> None:
    """The engine is killed twice in mid-stream; all tokens arrive once, in order, with both choices."""
    text = bytes(range(65, 91)) * 3
    engine = FakeEngine(script=lambda submit, choice: list(text[choice:]), step_s=0.005)
    async with stack(engine) as s:
        request = s.router.submit(spec(n=2))
        reader = asyncio.create_task(read(request))
        for _ in range(2):
            await asyncio.sleep(0.08)
            await engine.kill()
            await asyncio.sleep(0.05)
            await engine.start()
            await until(lambda: s.router.attached)
        ids, finishes = await reader
        assert bytes(ids[0][:-1]) == text
        assert bytes(ids[1][:-1]) == text[1:]
        assert finishes == {0: FinishReason.EOS, 1: FinishReason.EOS}
        replayed = engine.submits[-1].replay
        assert len(replayed) == 2
        assert len(replayed[0].token_id_i32le) >= 4
        assert len({submit.token for submit in engine.submits}) == 1
        assert len(s.infos) == 3
        assert engine.file_requests == [list(engine.files)]  # fetched once, by hash


async def test_after_the_budget_requests_fail_and_new_ones_are_refused() -> None:
    engine = FakeEngine(held=True)
    async with stack(engine, budget_s=0.2) as s:
        request = s.router.submit(spec())
        await engine.kill()
        with pytest.raises(Unavailable) as caught:
            await read(request)
        assert caught.value.reason == "ENGINE_LOST"
        assert caught.value.retry_after_ms is not None
        with pytest.raises(Unavailable, match="engine at"):
            s.router.submit(spec())
        assert s.router.obstacle() is not None
        await engine.start()
        await s.attached()
        engine.held = False
        assert (await read(s.router.submit(spec())))[1] == {0: FinishReason.EOS}


async def test_a_request_made_while_the_engine_is_away_waits_for_it() -> None:
    engine = FakeEngine()
    async with stack(engine) as s:
        await engine.kill()
        await until(lambda: not s.router.attached)
        request = s.router.submit(spec())
        await engine.start()
        assert (await read(request))[1] == {0: FinishReason.EOS}


async def test_another_model_ends_what_ran_on_the_old_one() -> None:
    engine = FakeEngine(held=True)
    async with stack(engine) as s:
        request = s.router.submit(spec())
        await engine.kill()
        engine.files = {**engine.files, "config.json": b"{}"}
        await engine.start()
        with pytest.raises(Unavailable, match="another model"):
            await read(request)
        assert s.infos[-1].text_files["config.json"] == b"{}"
        assert engine.file_requests[-1] == ["config.json"]


async def test_the_gateway_may_start_before_the_engine_and_says_what_is_missing() -> None:
    engine = FakeEngine(ready=False)
    await engine.start()

    async def on_engine(info: EngineInfo) -> None:
        assert info.max_model_len == 512

    router = Router(engine.address, name="g", version="0", on_engine=on_engine)
    task = asyncio.create_task(router.run())
    try:
        await until(lambda: "the worker is not there yet" in (router.obstacle() or ""))
        engine.ready = True
        await until(lambda: router.obstacle() is None)
    finally:
        task.cancel()
        await router.close()
        await engine.kill()


async def test_tokens_that_come_twice_are_dropped_and_missing_ones_are_asked_for_again() -> None:
    async with stack(FakeEngine(held=True)) as s:
        request = s.router.submit(spec())
        await until(lambda: s.engine.live)
        s.engine.step()
        running = s.engine.live[request.handle]
        running.sent[0] = 0  # again from the start
        s.engine.step()
        running.sent[0] = 5  # a hole
        s.engine.step()
        await until(lambda: len(s.engine.submits) == 2)
        s.engine.held = False
        ids, _ = await read(request)
        assert bytes(ids[0][:-1]) == b"hello world"
        assert len(s.engine.submits[1].replay[0].token_id_i32le) == 4


async def test_abort_by_token_and_explain() -> None:
    async with stack(FakeEngine(held=True)) as s:
        request = s.router.submit(spec())
        await until(lambda: s.engine.live)
        assert (await s.router.explain(request.token)).state == "running"
        assert await s.router.abort_by_token(request.token)
        assert (await read(request))[1] == {0: FinishReason.ABORT}
        assert not await s.router.abort_by_token(b"x" * 16)


async def test_an_engine_that_is_silent_is_taken_for_lost_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.router._SILENCE_S", 0.2)
    async with stack() as s:
        await until(lambda: not s.router.attached)
        assert s.router.missing is not None
        assert s.router.missing.endswith("no heartbeat for 0.2 s")
        await until(lambda: len(s.infos) > 1)
