"""The engine over real gRPC: its own core, a worker process with a simulated model, a plain gateway."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from protos import common_pb2, engine_pb2
from services.engine.__main__ import Engine
from services.engine.events import FINISH_ABORT, FINISH_EOS, FINISH_LENGTH, FINISH_STOP_ID, FINISH_STOP_STRING
from tests.engine.cluster import EOS, LONG, VOCABULARY, Gateway, all_blocks_free, running_engine


async def read_to_the_end(call: Any) -> None:
    while await call.read():
        pass


async def test_hello_says_what_is_served(gateway: Gateway) -> None:
    hello = await gateway.wait_until_served()
    assert (hello.engine.role, hello.engine.contract_max) == ("engine", 1)
    assert hello.model.vocab_size == VOCABULARY
    assert hello.limits == engine_pb2.EngineLimits(
        max_model_len=8192,
        block_size=16,
        kv_capacity_tokens=9600,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_n=16,
        tensor_size=1,
        pipeline_size=1,
    )
    files: dict[str, bytes] = {}
    async for answer in gateway.stub.GetTextFiles(engine_pb2.EngineServiceGetTextFilesRequest()):
        assert len(files.get(answer.chunk.file.name, b"")) == answer.chunk.offset
        files[answer.chunk.file.name] = files.get(answer.chunk.file.name, b"") + answer.chunk.data
    assert list(files) == [info.name for info in hello.text_files]
    assert [hashlib.sha256(content).digest() for content in files.values()] == [
        info.sha256 for info in hello.text_files
    ]
    request = engine_pb2.EngineServiceGetTextFilesRequest(names=["config.json"])
    names = {answer.chunk.file.name async for answer in gateway.stub.GetTextFiles(request)}
    assert names == {"config.json"}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.stub.GetTextFiles(engine_pb2.EngineServiceGetTextFilesRequest(names=["secret"])).read()
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_request_runs_to_its_length_and_leaves_nothing(gateway: Gateway) -> None:
    answer = await gateway.generate([1, 2, 3], max_tokens=20)
    assert len(answer.tokens[0]) == 20
    assert answer.finish == {0: FINISH_LENGTH}
    assert answer.started is not None
    assert answer.started.cached_tokens == 0
    again = await gateway.generate([1, 2, 3], max_tokens=20)
    assert again.tokens == answer.tokens
    await all_blocks_free(gateway)


async def test_a_prompt_that_was_seen_comes_from_the_cache(gateway: Gateway) -> None:
    prompt = list(range(100))
    first = await gateway.generate(prompt)
    second = await gateway.generate(prompt)
    assert second.tokens == first.tokens
    assert second.started is not None
    assert second.started.cached_tokens == 96
    reset = await gateway.stub.ResetPrefixCache(engine_pb2.ResetPrefixCacheRequest())
    assert reset.blocks >= 6
    third = await gateway.generate(prompt)
    assert third.started is not None
    assert third.started.cached_tokens == 0


async def test_stop_ids_and_eos_end_a_choice(gateway: Gateway) -> None:
    tokens = (await gateway.generate([9, 8], max_tokens=12)).tokens[0]
    stop = tokens[5]
    stopped = await gateway.generate([9, 8], max_tokens=12, sampling={"stop_token_ids": [stop]})
    assert stopped.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert stopped.finish == {0: FINISH_STOP_ID}
    forced = await gateway.generate([9, 8], max_tokens=12, sampling={"allowed_token_ids": [EOS]})
    assert forced.tokens[0] == [EOS]
    assert forced.finish == {0: FINISH_EOS}


async def test_an_abort_in_mid_stream_frees_its_blocks(gateway: Gateway) -> None:
    answer = await gateway.submit(1, [1, 2, 3], max_tokens=LONG)
    await gateway.until(lambda: len(answer.tokens.get(0, ())) > 5)
    assert gateway.loads[-1].running == 1
    await gateway.send(abort=engine_pb2.AbortRows(handle=1, reason=common_pb2.FINISH_REASON_ABORT))
    await gateway.finished(1)
    assert answer.finish == {0: FINISH_ABORT}
    await all_blocks_free(gateway)


async def test_one_choice_is_ended_by_a_stop_string_and_the_other_goes_on(gateway: Gateway) -> None:
    answer = await gateway.submit(1, [1, 2, 3], max_tokens=60, sampling={"n": 2})
    await gateway.until(lambda: len(answer.tokens.get(1, ())) > 2)
    reason = common_pb2.FINISH_REASON_STOP_STRING
    await gateway.send(abort=engine_pb2.AbortRows(handle=1, choice=1, reason=reason, kept_tokens=2))
    await gateway.send(abort=engine_pb2.AbortRows(handle=1, choice=2, reason=reason))
    await gateway.send(abort=engine_pb2.AbortRows(handle=77, reason=reason))
    await gateway.finished(1, n=2)
    assert answer.finish == {0: FINISH_LENGTH, 1: FINISH_STOP_STRING}
    assert len(answer.tokens[0]) == 60


async def test_any_gateway_may_abort_by_token(gateway: Gateway, listen: str) -> None:
    answer = await gateway.submit(1, [1, 2, 3], max_tokens=LONG, token=b"0123456789abcdef")
    await gateway.until(lambda: answer.tokens)
    other = Gateway(listen)
    await other.attach()
    await other.send(abort=engine_pb2.AbortRows(token=b"0123456789abcdef", reason=5))
    await gateway.finished(1)
    assert answer.finish == {0: FINISH_ABORT}
    await other.close()


async def test_two_gateways_may_use_equal_handles(gateway: Gateway, listen: str) -> None:
    other = Gateway(listen)
    await other.attach()
    answers = await asyncio.gather(
        *(one.generate([index], max_tokens=30) for index, one in enumerate((gateway, other)))
    )
    alone = [await gateway.generate([index], handle=2, max_tokens=30) for index in range(2)]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
    assert answers[0].tokens != answers[1].tokens
    await other.close()


async def test_many_at_once_are_what_each_is_alone(gateway: Gateway) -> None:
    prompts = {handle: [handle % 7, *range(handle)] for handle in range(1, 41)}
    alone = {handle: (await gateway.generate(prompt)).tokens for handle, prompt in list(prompts.items())[:5]}
    for handle, prompt in prompts.items():
        await gateway.submit(handle, prompt)
    await gateway.finished(*prompts)
    assert {handle: gateway.answers[handle].tokens for handle in alone} == alone


async def test_logprobs_travel_with_their_tokens(gateway: Gateway) -> None:
    plain = await gateway.submit(1, [5, 6], max_tokens=10)
    asking = await gateway.submit(2, [5, 6, 7], max_tokens=10, sampling={"logprobs": 2, "prompt_logprobs": 1})
    await gateway.finished(1, 2)
    assert plain.logprobs == []
    assert [entry[0] for entry in asking.logprobs[::3]] == asking.tokens[0]
    assert len(asking.logprobs) == 30
    assert asking.prompt_logprobs == {0: 0, 1: 2, 2: 2}


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": []}, 3, "prompt"),
        ({"prompt": [VOCABULARY]}, 3, "prompt"),
        ({"prompt": list(range(250)) * 40}, 3, "prompt"),
        ({"prompt": [1], "max_tokens": 0}, 3, "max_tokens"),
        ({"prompt": [1], "token": b"x"}, 3, "token"),
        ({"prompt": [1], "sampling": {"n": 17}}, 3, "n"),
        ({"prompt": [1], "sampling": {"constraint": common_pb2.Constraint()}}, 3, "constraint"),
        ({"prompt": [1], "media": [common_pb2.MediaRef(modality="audio")]}, 12, "media[0].modality"),
        ({"prompt": [1], "deadline_ms": 0}, 4, "deadline_ms"),
    ],
)
async def test_a_rejected_request_leaves_nothing(
    gateway: Gateway, fields: dict[str, object], code: int, field: str
) -> None:
    prompt: object = fields.pop("prompt")
    answer = await gateway.submit(1, prompt, **fields)  # type: ignore[arg-type]
    await gateway.finished(1)
    assert answer.rejected is not None
    assert (answer.rejected.code, answer.rejected.field) == (code, field)
    assert answer.tokens == {}
    assert (await gateway.generate([1])).finish == {0: FINISH_LENGTH}, "the handle is free again"


async def test_a_handle_in_use_is_refused(gateway: Gateway) -> None:
    answer = await gateway.submit(1, [1, 2], max_tokens=200)
    again = engine_pb2.Submit(handle=1, token=b"o" * 16, prompt_id_i32le=array("i", [3]).tobytes())
    again.sampling.max_tokens = 5
    await gateway.send(submit=again)
    await gateway.until(lambda: answer.rejected and answer.finish)
    assert answer.rejected is not None
    assert answer.rejected.reason == "HANDLE_IN_USE"
    assert len(answer.tokens[0]) == 200


async def test_too_many_waiting_are_refused_with_a_time_to_retry(gateway: Gateway) -> None:
    await gateway.stub.Pause(engine_pb2.PauseRequest())
    handles = range(1, 76)
    for handle in handles:
        await gateway.submit(handle, [handle, 0])
    await gateway.finished(*handles[70:])
    await gateway.stub.Unpause(engine_pb2.UnpauseRequest())
    await gateway.finished(*handles)
    refused = [answer.rejected for answer in gateway.answers.values() if answer.rejected]
    assert len(refused) == 5
    assert {(failure.code, failure.reason) for failure in refused} == {(8, "QUEUE_FULL")}
    assert all(failure.retry_after_ms for failure in refused)
    await all_blocks_free(gateway)


async def test_a_deadline_that_passes_in_the_queue_fails_the_request(gateway: Gateway) -> None:
    await gateway.stub.Pause(engine_pb2.PauseRequest())
    late = await gateway.submit(1, [1, 2], deadline_ms=30)
    patient = await gateway.submit(2, [1, 2], deadline_ms=60_000)
    await gateway.finished(1)
    assert late.failed is not None
    assert late.failed.code == 4
    assert patient.tokens == {}
    await gateway.stub.Unpause(engine_pb2.UnpauseRequest())
    await gateway.finished(2)
    assert patient.finish == {0: FINISH_LENGTH}


async def test_heartbeats_come_when_nothing_runs(gateway: Gateway) -> None:
    assert gateway.welcome is not None
    assert gateway.welcome.heartbeat_ms == 200
    before = len(gateway.loads)
    await gateway.until(lambda: True)
    await asyncio.sleep(0.7)
    assert len(gateway.loads) >= before + 2


async def test_a_gateway_that_attaches_again_goes_on(gateway: Gateway, listen: str) -> None:
    whole = (await gateway.generate([1, 2, 3], handle=9, max_tokens=300)).tokens
    answer = await gateway.submit(1, [1, 2, 3], max_tokens=300, sampling={"logprobs": 0})
    await gateway.until(lambda: len(answer.tokens.get(0, ())) > 20)
    await gateway.send(acknowledge=engine_pb2.Acknowledge(handle=1, choice=0, tokens=10))
    await gateway.detach()
    await asyncio.sleep(0.05)
    await gateway.attach()
    assert gateway.live_handles == [1]
    await gateway.finished(1)
    assert answer.tokens == whole
    assert [entry[0] for entry in answer.logprobs] == whole[0]
    assert answer.started is not None


async def test_a_newer_stream_of_the_same_gateway_takes_over(gateway: Gateway, listen: str) -> None:
    answer = await gateway.submit(1, [1, 2, 3], max_tokens=200)
    await gateway.until(lambda: answer.tokens)
    newer = Gateway(listen, gateway.incarnation)
    newer.answers = {1: answer}
    await newer.attach()
    assert newer.live_handles == [1]
    await newer.finished(1)
    assert len(answer.tokens[0]) == 200
    await newer.close()


async def test_a_replay_goes_on_from_what_it_has(gateway: Gateway) -> None:
    whole = (await gateway.generate([4, 5], max_tokens=30, sampling={"n": 2})).tokens
    replay = [
        engine_pb2.ChoiceReplay(token_id_i32le=array("i", whole[0][:12]).tobytes()),
        engine_pb2.ChoiceReplay(token_id_i32le=array("i", whole[1]).tobytes(), finish_reason=4),
    ]
    answer = await gateway.submit(1, [4, 5], max_tokens=30, sampling={"n": 2}, replay=replay)
    await gateway.finished(1)
    assert answer.tokens == whole
    assert answer.finish == {0: FINISH_LENGTH}, "the finished choice is not told again"


async def test_what_is_not_built_is_refused_by_name(gateway: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.stub.Profile(engine_pb2.EngineServiceProfileRequest())
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    gateway.answers[3] = answer = await gateway.submit(2, [1])
    await gateway.send(resume=engine_pb2.ResumeRow(handle=3))
    await gateway.until(lambda: answer.rejected)
    assert answer.rejected is not None
    assert answer.rejected.code == 12


@pytest.mark.parametrize(
    "frame",
    [
        engine_pb2.AttachRequest(),
        engine_pb2.AttachRequest(submit=engine_pb2.Submit()),
        engine_pb2.AttachRequest(hello=engine_pb2.AttachHello()),
        engine_pb2.AttachRequest(
            hello=engine_pb2.AttachHello(gateway=common_pb2.Peer(incarnation=1, contract_min=2, contract_max=3))
        ),
    ],
)
async def test_a_stream_begins_with_a_hello_that_fits(gateway: Gateway, frame: engine_pb2.AttachRequest) -> None:
    call = gateway.stub.Attach()
    await call.write(frame)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await gateway.generate([1])).finish


async def test_a_second_hello_ends_the_stream(gateway: Gateway) -> None:
    call = gateway.stub.Attach()
    hello = engine_pb2.AttachRequest(
        hello=engine_pb2.AttachHello(gateway=common_pb2.Peer(incarnation=5, contract_min=1, contract_max=1))
    )
    await call.write(hello)
    await call.read()
    await call.write(hello)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(read_to_the_end(call), 20)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gateway_that_stays_away_loses_its_requests(worker: str, listen: str) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(worker, listen, num_blocks=600, gateway_grace_s=0.6))
        gateway, watcher = Gateway(listen), Gateway(listen)
        await gateway.wait_until_served()
        await gateway.attach()
        await watcher.attach()
        answer = await gateway.submit(1, [1, 2, 3], max_tokens=LONG)
        await gateway.until(lambda: answer.tokens)
        await gateway.close()
        await watcher.until(lambda: watcher.loads and watcher.loads[-1].running == 1)
        await all_blocks_free(watcher)
        assert engine.loop is not None
        assert engine.loop.sessions.live == 0
        again = Gateway(listen, gateway.incarnation)
        await again.attach()
        assert again.live_handles == []
        await again.close()
        await watcher.close()


async def test_draining_refuses_new_requests_and_finishes_the_live(worker: str, listen: str) -> None:
    async with running_engine(worker, listen, num_blocks=600, drain_s=20) as engine:
        gateway = Gateway(listen)
        await gateway.wait_until_served()
        await gateway.attach()
        answer = await gateway.submit(1, [1, 2, 3], max_tokens=100)
        await gateway.until(lambda: answer.tokens)
        draining = asyncio.create_task(engine.drain())
        await gateway.until(lambda: gateway.draining)
        refused = await gateway.submit(2, [1])
        await gateway.finished(1, 2)
        await draining
        assert refused.rejected is not None
        assert (refused.rejected.code, refused.rejected.reason) == (14, "DRAINING")
        assert len(answer.tokens[0]) == 100
        await gateway.close()


async def test_a_bug_of_the_core_fails_requests_and_not_the_engine(
    engine: Engine, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await gateway.submit(1, [1, 2, 3], max_tokens=LONG)
    await gateway.until(lambda: answer.tokens)
    assert engine.loop is not None

    def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(engine.loop._core, "apply", broken)
    await gateway.finished(1)
    assert answer.failed is not None
    assert answer.failed.code == 13
    assert answer.failed.error_id in answer.failed.message
    monkeypatch.setattr(type(engine.loop._core), "submit", broken)
    refused = await gateway.submit(2, [1])
    await gateway.finished(2)
    assert refused.rejected is not None
    assert refused.rejected.code == 13
    monkeypatch.undo()
    assert (await gateway.generate([1, 2, 3], handle=3)).finish == {0: FINISH_LENGTH}
    await all_blocks_free(gateway)
