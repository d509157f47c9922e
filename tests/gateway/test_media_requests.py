"""Requests with media through a whole gateway with its real media process, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path

import grpc.aio
import pytest
from google.rpc.code_pb2 import INVALID_ARGUMENT

from protos import common_pb2, gateway_pb2
from services.common.errors import DataLoss, InvalidArgument
from services.common.server import error_of
from tests.gateway.fake_engine import until
from tests.gateway.media_model import (
    FILM,
    IMAGE,
    PICTURE,
    VIDEO,
    Body,
    asked,
    chat,
    film,
    grpc_chat,
    grpc_turns,
    ids_of,
    image_part,
    pinned,
    png,
    refused,
    seeing_engine,
    seeing_stack,
    seen,
    upload,
    url,
    user,
    video_part,
)
from tests.gateway.stack import Stack


async def test_media_stand_in_the_prompt_where_they_stand_among_the_text(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        small, tall = png(64, 64, 1), png(32, 128, 2)
        body = await chat(s, user("see ", image_part(), ", ", image_part(small), video_part(), image_part(tall), "?"))
        (submit,) = s.engine.submits
        ids = asked("see ", PICTURE, ", ", seen(4), FILM, seen(4), "?")
        assert ids_of(submit) == ids
        assert body["usage"]["prompt_tokens"] == len(ids)
        assert body["choices"][0]["message"]["content"] == "hello world"
        first = ids.index(IMAGE)
        film_at, film_end = ids.index(VIDEO), len(ids) - ids[::-1].index(VIDEO)
        last = ids.index(IMAGE, film_end)
        assert [(m.modality, m.offset, m.length, m.embeddings, list(m.grid)) for m in submit.media] == [
            ("image", first, 6, 6, [1, 4, 6]),
            ("image", first + 10, 4, 4, [1, 4, 4]),
            ("video", film_at, film_end - film_at, 8, [2, 4, 4]),
            ("image", last, 4, 4, [1, 8, 2]),
        ]
        assert len({m.hash for m in submit.media}) == 4
        for m in submit.media:
            assert (tmp_path / "blobs" / m.hash.hex()).is_file()
        assert pinned(s) == 0


async def test_every_api_asks_the_engine_for_the_same(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        data = png()
        await chat(s, user("see ", image_part(data)), seed=1)
        item = {"type": "input_image", "image_url": url(data), "detail": "high"}
        content = [{"type": "input_text", "text": "see "}, item]
        answer = await s.http.post("/v1/responses", json={"input": [{"role": "user", "content": content}], "seed": 1})
        assert answer.status_code == 200
        sampling = gateway_pb2.SamplingOptions(seed=1)
        text = gateway_pb2.ContentPart(text="see ")
        await grpc_chat(s, text, gateway_pb2.ContentPart(image_url=url(data)), sampling=sampling)
        digest = await upload(s, data, sha256=hashlib.sha256(data).digest())
        await grpc_chat(s, text, gateway_pb2.ContentPart(image_hash=digest), sampling=sampling)
        rest, responses, grpc_url, grpc_hash = s.engine.submits
        assert ids_of(rest) == asked("see ", PICTURE)
        for other in (responses, grpc_url, grpc_hash):
            assert ids_of(other) == ids_of(rest)
            assert list(other.media) == list(rest.media)
            assert other.sampling == rest.sampling
        assert (s.gateway.media.made, s.gateway.media.found) == (1, 3)


async def test_a_conversation_with_media_is_tokenized_as_it_would_be_sent(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        answer = await s.http.post("/tokenize", json={"messages": user(image_part(), video_part(), "x")})
        assert answer.json()["tokens"] == asked(PICTURE, FILM, "x")
        parts = [gateway_pb2.ContentPart(image_url=url(png())), gateway_pb2.ContentPart(text="x")]
        messages = gateway_pb2.TokenizeMessages(messages=grpc_turns(*parts))
        assert list((await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=messages))).token_ids) == asked(
            PICTURE, "x"
        )
        messages.mm_processor_kwargs_json = '{"max_pixels": 4096}'
        assert list((await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=messages))).token_ids) == asked(
            seen(2), "x"
        )
        assert (pinned(s), s.engine.submits) == (0, [])


async def test_what_is_no_image_is_told_at_its_part(tmp_path: Path) -> None:
    """C127, C128."""
    async with seeing_stack(tmp_path) as s:
        for bad, words in (
            (png(kind="JPEG")[:-128], "broken"),
            (b"<html>not found</html>", "not an image"),
            (b"", "empty"),
        ):
            error = await refused(s, user("one ", image_part(), image_part(bad)))
            assert error["param"] == "messages[0].content[2]"
            assert words in error["message"]
            part = {"type": "input_image", "image_url": url(bad)}
            answer = await s.http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0]")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await grpc_chat(s, gateway_pb2.ContentPart(image_url=url(bad)))
            assert isinstance(error_of(caught.value), InvalidArgument)
            assert error_of(caught.value).field == "messages[0].content[0]"
        for bad_url in (  # C128
            "data:image/png;base64,not!!!base64!!!",
            "data:image/png,abc",
            "data:text/plain;base64,aGVsbG8=",
            "data:",
            "https://example.com/a.png",
        ):
            error = await refused(s, user("one ", {"type": "image_url", "image_url": {"url": bad_url}}))
            assert error["param"] == "messages[0].content[1]"
        assert (pinned(s), s.engine.submits) == (0, [])


async def test_an_item_that_the_engine_refuses_is_told_at_its_part(tmp_path: Path) -> None:
    """The engine counts items as they lie in the prompt, and knows no parts."""
    engine = seeing_engine()
    engine.refuse = common_pb2.Failure(
        code=INVALID_ARGUMENT,
        message="media[1] makes 64 embeddings; the encoder takes 16 at most",
        field="media[1]",
        reason="MEDIA_TOO_LARGE",
    )
    async with seeing_stack(tmp_path, engine) as s:
        turns = [*user("one ", video_part()), *user("two ", image_part())]
        error = await refused(s, turns)
        assert (error["param"], error["code"]) == ("messages[1].content[1]", "media_too_large")
        assert error["message"] == "messages[1].content[1] makes 64 embeddings; the encoder takes 16 at most"
        answer = await s.http.post(
            "/v1/responses",
            json={"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(png())}] * 2}]},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[1]")
        assert pinned(s) == 0


async def test_one_image_of_eight_requests_is_decoded_once(tmp_path: Path) -> None:
    """C133; that it is encoded once is the engine's."""
    async with seeing_stack(tmp_path) as s:
        bodies = await asyncio.gather(*(chat(s, user(image_part(), f"{i}")) for i in range(8)))
        assert [body["choices"][0]["message"]["content"] for body in bodies] == ["hello world"] * 8
        assert s.gateway.media.made == 1
        assert len({submit.media[0].hash for submit in s.engine.submits}) == 1
        assert sorted(map(ids_of, s.engine.submits)) == [asked(PICTURE, f"{i}") for i in range(8)]


def media_children() -> list[int]:
    """The processes that decode."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"media.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_text_is_answered_while_no_image_can_be(tmp_path: Path) -> None:
    """C141: images are decoded in other processes, so that a process that stands still holds up nobody else."""
    async with seeing_stack(tmp_path) as s:
        await chat(s, user(image_part()))
        media = media_children()
        assert media
        try:
            for pid in media:
                os.kill(pid, signal.SIGSTOP)
            images = [asyncio.create_task(chat(s, user(image_part(png(seed=i))))) for i in range(1, 21)]
            await until(lambda: s.gateway.front._arriving == 20)
            for _ in range(3):
                assert (await chat(s, user("text")))["choices"][0]["message"]["content"] == "hello world"
            assert not any(task.done() for task in images)
        finally:
            for pid in media:
                os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*images)
        assert s.gateway.media.made == 21


class TestModalities:
    """C142: what a model does not take is refused by the name of the part, whatever the API."""

    async def refusals(self, s: Stack, part: Body, grpc_part: gateway_pb2.ContentPart) -> list[str | None]:
        found = [
            (await refused(s, user("x", part)))["param"],
            (await refused(s, user("x", part), stream=True))["param"],
            (await refused(s, user("x", part), "/tokenize"))["param"],
        ]
        if part["type"] == "image_url":
            item = {"type": "input_image", "image_url": part["image_url"]["url"]}
            answer = await s.http.post("/v1/responses", json={"input": [{"role": "user", "content": ["x", item][1:]}]})
            found.append(answer.json()["error"]["param"].replace("input[0].content[0]", "messages[0].content[1]"))
        turns = grpc_turns(gateway_pb2.ContentPart(text="x"), grpc_part)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await grpc_chat(s, *turns[0].content)
        found.append(error_of(caught.value).field)
        messages = gateway_pb2.TokenizeMessages(messages=turns)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=messages))
        found.append((error_of(caught.value).field or "").removeprefix("messages."))
        assert s.engine.submits == []
        return found

    async def test_a_model_without_eyes(self, tmp_path: Path) -> None:
        engine = seeing_engine(capabilities=("generate",))
        async with seeing_stack(tmp_path, engine) as s:
            images = await self.refusals(s, image_part(), gateway_pb2.ContentPart(image_hash=bytes(32)))
            videos = await self.refusals(s, video_part(), gateway_pb2.ContentPart(video_url=url(film(), "video/mp4")))
            assert set(images) | set(videos) == {"messages[0].content[1]"}
            assert not (tmp_path / "blobs").exists()

    async def test_a_worker_that_takes_images_alone(self, tmp_path: Path) -> None:
        engine = seeing_engine(capabilities=("generate", "image"))
        async with seeing_stack(tmp_path, engine) as s:
            videos = await self.refusals(s, video_part(), gateway_pb2.ContentPart(video_hash=bytes(32)))
            assert set(videos) == {"messages[0].content[1]"}
            await chat(s, user(image_part()))

    async def test_audio(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path) as s:
            for part in (
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
            ):
                for path in ("/v1/chat/completions", "/tokenize"):
                    error = await refused(s, user("x", part), path)
                    assert (error["param"], part["type"] in error["message"]) == ("messages[0].content[1]", True)
                answer = await s.http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
                assert answer.json()["error"]["param"] == "input[0].content[0]"


class TestUploads:
    async def test_a_video_in_pieces(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path) as s:
            data = film()
            digest = await upload(s, *(data[i : i + 100] for i in range(0, len(data), 100)))
            assert digest == hashlib.sha256(data).digest()
            answers = await grpc_chat(s, gateway_pb2.ContentPart(video_hash=digest), gateway_pb2.ContentPart(text="?"))
            assert answers[-1].content == "hello world"
            assert ids_of(s.engine.submits[0]) == asked(FILM, "?")

    async def test_what_is_wrong_leaves_nothing(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path, media_max_bytes=2 << 20) as s:
            cases: list[tuple[list[bytes], Body, str]] = [
                ([b"x"], {"sha256": bytes(32)}, "sha256"),
                ([b"x"], {"sha256": b"short"}, "sha256"),
                ([b"x", b"y"], {"sha256": hashlib.sha256(b"xy").digest(), "at": 1}, "sha256"),
                ([bytes((1 << 20) + 1)], {}, "data"),
                ([bytes(1 << 20)] * 3, {}, "data"),
                ([], {}, "data"),
                ([b"", b""], {}, "data"),
            ]
            for pieces, more, field in cases:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await upload(s, *pieces, **more)
                error = error_of(caught.value)
                assert isinstance(error, DataLoss if more.get("sha256") == bytes(32) else InvalidArgument)
                assert error.field == field
            assert os.listdir(tmp_path / "blobs-uploads") == []

    async def test_what_was_never_uploaded_is_told(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path) as s:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await grpc_chat(s, gateway_pb2.ContentPart(image_hash=bytes(32)))
            error = error_of(caught.value)
            assert (error.field, error.reason) == ("messages[0].content[0]", "MEDIA_UNKNOWN")


async def test_an_item_may_be_named_and_asked_for_again(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        await chat(s, user(image_part(uuid="cat"), "?"), cache_salt="a")
        await chat(s, user({"type": "image_url", "image_url": None, "uuid": "cat"}, "?"), cache_salt="a")
        first, second = s.engine.submits
        assert list(first.media) == list(second.media)
        assert ids_of(second) == asked(PICTURE, "?")
        await grpc_chat(
            s,
            gateway_pb2.ContentPart(image_url="", uuid="cat"),
            options=gateway_pb2.RequestOptions(cache_salt="a"),
        )
        for salt in ("b", None):
            error = await refused(s, user({"type": "image_url", "uuid": "cat"}), cache_salt=salt)
            assert error["param"] == "messages[0].content[0]"
        assert len(s.engine.submits) == 3


async def test_items_have_a_limit_and_metrics_tell_items_and_failures(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path, media_max_items=3) as s:
        error = await refused(s, [*user(image_part(), image_part()), *user(video_part(), "x", image_part())])
        assert error["param"] == "messages[1].content[2]"
        await chat(s, user(image_part(), image_part(), video_part()))
        await refused(s, user({"type": "image_url", "image_url": {"url": "https://example.com/"}}))
        await refused(s, user(image_part(b"no image")))
        scraped = (await s.http.get("/metrics")).text
        for line in (
            'triptych:media_items_total{modality="image"} 2.0',
            'triptych:media_items_total{modality="video"} 1.0',
            'triptych:media_seconds_count{modality="image"} 2.0',
            'triptych:media_failures_total{modality="image",reason="media_refused"} 1.0',
            'triptych:media_failures_total{modality="image",reason="media_malformed"} 1.0',
            "triptych:media_made 2.0",
        ):
            assert line in scraped, line
