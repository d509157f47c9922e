"""A request whose media the worker did not find: put back, submitted once more, and the client sees a pause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from protos import common_pb2, engine_pb2
from services.common.errors import FailedPrecondition, TriptychError, Unavailable
from services.gateway.inflight import EngineRequest
from services.gateway.request import FinishReason, GenerateSpec, MediaItem
from services.gateway.router import PutBack, Router
from services.gateway.wire import EngineInfo
from tests.gateway.fake_engine import END, FakeEngine, until
from tests.gateway.test_router import read, spec

ITEMS = (
    MediaItem(b"a" * 32, "image", 0, 1, 1, (1, 2, 2)),
    MediaItem(b"b" * 32, "video", 1, 2, 2, (2, 2, 2)),
)
HELLO = [*b"hello world", END]


def with_media(**sampling: object) -> GenerateSpec:
    return replace(spec(**sampling), media=ITEMS)


@dataclass
class Blobs:
    """Who puts blobs back, and is asked to."""

    asked: list[Sequence[bytes]] = field(default_factory=list)
    may: asyncio.Event = field(default_factory=asyncio.Event)
    error: TriptychError | None = None

    async def put_back(self, names: Sequence[bytes]) -> None:
        self.asked.append(names)
        await self.may.wait()
        if self.error is not None:
            raise self.error


@contextlib.asynccontextmanager
async def attached(engine: FakeEngine, put_back: PutBack | None) -> AsyncIterator[Router]:
    await engine.start()

    async def on_engine(info: EngineInfo) -> None:
        del info

    router = Router(engine.address, name="g", version="0", on_engine=on_engine, put_back=put_back)
    router.blob_address = "127.0.0.1:7"
    task = asyncio.create_task(router.run())
    try:
        await until(lambda: router.attached)
        yield router
    finally:
        task.cancel()
        await router.close()
        await engine.kill()


def miss(engine: FakeEngine, handle: int, choice: int | None = None) -> None:
    """The engine's word for a row that lacked its media."""
    if choice is None or engine.live[handle].submit.sampling.n == 1:
        engine.live.pop(handle, None)
    failure = common_pb2.Failure(code=14, message="the image was not found by the worker", reason="MEDIA_MISSING")
    engine.send(engine_pb2.AttachResponse(failed=engine_pb2.Failed(handle=handle, choice=choice, failure=failure)))


async def missed(router: Router, engine: FakeEngine) -> EngineRequest:
    """A request whose media the worker has just not found."""
    request = router.submit(with_media())
    await until(lambda: len(engine.submits) == 1)
    miss(engine, engine.submits[0].handle)
    return request


async def test_the_submit_and_the_hello_say_what_the_worker_needs() -> None:
    engine = FakeEngine()
    async with attached(engine, None) as router:
        await read(router.submit(with_media()))
    (submit,) = engine.submits
    image, video = submit.media
    assert (image.hash, image.modality, image.offset, image.length, image.embeddings) == (b"a" * 32, "image", 0, 1, 1)
    assert list(video.grid) == [2, 2, 2]
    assert engine.blob_addresses == ["127.0.0.1:7"]


async def test_a_miss_is_put_back_and_replayed_where_it_was() -> None:
    engine, blobs = FakeEngine(per_step=5, held=True), Blobs()
    async with attached(engine, blobs.put_back) as router:
        request = router.submit(with_media())
        await until(lambda: len(engine.live) == 1)
        first = engine.submits[0].handle
        engine.step()
        miss(engine, first, choice=0)
        await until(lambda: blobs.asked)
        assert blobs.asked == [[b"a" * 32, b"b" * 32]]
        assert len(engine.submits) == 1, "not before they are back"
        blobs.may.set()
        await until(lambda: len(engine.submits) == 2)
        again = engine.submits[1]
        assert again.handle != first
        assert list(again.media) == list(engine.submits[0].media)
        assert again.replay[0].token_id_i32le == b"".join(bytes([token, 0, 0, 0]) for token in b"hello")
        engine.held = False
        ids, finishes = await read(request)
        assert (ids, finishes) == ({0: HELLO}, {0: FinishReason.EOS})
        assert router.live == 0


async def test_the_choices_beside_it_go_along() -> None:
    engine, blobs = FakeEngine(held=True), Blobs()
    blobs.may.set()
    async with attached(engine, blobs.put_back) as router:
        request = router.submit(with_media(n=2))
        await until(lambda: len(engine.live) == 1)
        first = engine.submits[0].handle
        miss(engine, first, choice=0)
        miss(engine, first, choice=1)
        await until(lambda: len(engine.submits) == 2)
        assert [abort.handle for abort in engine.aborts] == [first]
        engine.held = False
        ids, _ = await read(request)
        assert ids == {0: HELLO, 1: HELLO}
        assert len(blobs.asked) == 1


async def test_a_second_miss_is_the_clients() -> None:
    engine, blobs = FakeEngine(held=True), Blobs()
    blobs.may.set()
    async with attached(engine, blobs.put_back) as router:
        request = router.submit(with_media())
        for attempt in (1, 2):
            await until(lambda attempt=attempt: len(engine.submits) == attempt)
            miss(engine, engine.submits[-1].handle)
        with pytest.raises(Unavailable, match="the image was not found by the worker"):
            await read(request)
        assert len(engine.submits) == 2
        assert router.live == 0


async def test_what_cannot_be_put_back_says_so() -> None:
    engine, blobs = FakeEngine(held=True), Blobs(error=FailedPrecondition("the blob is gone"))
    blobs.may.set()
    async with attached(engine, blobs.put_back) as router:
        request = await missed(router, engine)
        with pytest.raises(FailedPrecondition, match="the blob is gone"):
            await read(request)
        assert router.live == 0


async def test_a_request_that_ends_meanwhile_is_not_submitted() -> None:
    engine, blobs = FakeEngine(held=True), Blobs()
    async with attached(engine, blobs.put_back) as router:
        request = await missed(router, engine)
        await until(lambda: blobs.asked)
        request.abort()
        blobs.may.set()
        assert (await read(request))[1] == {0: FinishReason.ABORT}
        marker = router.submit(spec())
        await until(lambda: len(engine.submits) == 2)
        assert engine.submits[1].token == marker.token


async def test_an_engine_that_comes_back_meanwhile_gets_it_once() -> None:
    engine, blobs = FakeEngine(held=True), Blobs()
    async with attached(engine, blobs.put_back) as router:
        request = await missed(router, engine)
        await until(lambda: blobs.asked)
        await engine.kill()
        await until(lambda: not router.attached)
        await engine.start()
        await until(lambda: router.attached)
        blobs.may.set()
        await until(lambda: len(engine.submits) == 2)
        engine.held = False
        ids, _ = await read(request)
        assert ids == {0: HELLO}
        assert len(engine.submits) == 2
