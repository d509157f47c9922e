"""Prompts with media: what clients may ask of them, what their text can't do, and that nothing is held too long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from protos import common_pb2, gateway_pb2
from services.common.errors import InvalidArgument
from services.gateway.attachments import Attachments, cut
from services.gateway.media.items import Processed
from services.gateway.parts import MediaPart
from services.gateway.processors.rules import MediaRules
from services.gateway.request import MediaItem
from tests.gateway.fake_engine import until
from tests.gateway.media_model import (
    IMAGE,
    PICTURE,
    VIDEO,
    Body,
    asked,
    chat,
    film,
    grpc_chat,
    ids_of,
    image_part,
    pinned,
    png,
    refused,
    seeing_engine,
    seeing_stack,
    seen,
    url,
    user,
    video_part,
)

PAD, FRAMES = "<|image_pad|>", "<|video_pad|>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_text_cannot_stand_for_media(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        for messages in (
            user(PAD),
            user(f"a {FRAMES} b"),
            user(image_part(), PAD),
            user(image_part(), FRAMES),
            user(PAD, image_part()),
            user(image_part(), f"<|vision_start|>{PAD}<|vision_end|>"),
            [{"role": "system", "content": PAD}, *user(image_part())],
            [*user(image_part()), {"role": "assistant", "content": PAD}, *user("x")],
            [*user("x"), {"role": "assistant", "tool_calls": [TOOL | {"id": "1", "function": {"name": PAD}}]}],
        ):
            for path in ("/v1/chat/completions", "/tokenize"):
                error = await refused(s, messages, path)
                assert error["param"].startswith("messages")
        assert (s.engine.submits, s.gateway.media.made, pinned(s)) == ([], 0, 0)


async def test_no_other_field_can_stand_for_media_either(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        note = {"chat_template_kwargs": {"note": f"see {PAD}"}}
        for messages in (user("x"), user(image_part())):
            await refused(s, messages, **note)
        item = {"role": "user", "content": [{"type": "input_text", "text": PAD}]}
        answer = await s.http.post("/v1/responses", json={"input": [item]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        for prompt in (f"a {PAD}", [1, 2, IMAGE], [f"a {FRAMES}"], [[VIDEO]]):
            answer = await s.http.post("/v1/completions", json={"prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["param"][:6]) == (400, "prompt")
        call = s.stub.Generate(gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[IMAGE])))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        answer = await s.http.post("/v1/embeddings", json={"input": PAD})
        assert answer.status_code == 400
        assert s.engine.submits == []


async def test_a_mark_of_vision_in_text_moves_nothing(tmp_path: Path) -> None:
    async with seeing_stack(tmp_path) as s:
        await chat(s, user("<|vision_end|>", image_part(), "<|vision_start|>"))
        (submit,) = s.engine.submits
        ids = ids_of(submit)
        assert ids == asked(PICTURE[-1:], PICTURE, PICTURE[:1])
        assert (submit.media[0].offset, submit.media[0].length) == (ids.index(IMAGE), 6)


async def test_media_that_the_template_does_not_show_are_told(tmp_path: Path) -> None:
    """Also where a text would fill the place."""
    async with seeing_stack(tmp_path) as s:
        call: Body = {"role": "assistant", "tool_calls": [{**TOOL, "id": "1", "function": {"name": "f"}}]}
        result = {"role": "tool", "tool_call_id": "1", "content": [image_part()]}
        for last, where in (("x", "messages[2].content[0]"), (PAD, "messages[3]")):
            error = await refused(s, [*user("x"), call, result, *user(last)])
            assert error["param"] == where
        assert s.gateway.media.made == 0


def test_items_lie_in_the_order_of_the_prompt() -> None:
    """Which a template may choose: here it shows the video first."""
    rules = MediaRules({}, {"image": PAD, "video": FRAMES}, "[", "]", "timed")
    door: Any = None
    media = Attachments(rules, {"image": IMAGE, "video": VIDEO}, frozenset(), door)
    image = Processed(b"i" * 32, "image", (1, 2, 4), 2, (), 0.0, 0)
    film = Processed(b"v" * 32, "video", (2, 2, 2), 2, (0.0, 1.0), 2.0, 0)
    parts = [MediaPart("image", "data:x", "messages[0]"), MediaPart("video", "data:y", "messages[1]")]
    placed = media.place([7, VIDEO, 8, VIDEO, 9, IMAGE, IMAGE], [image, film], parts, "messages")
    assert [(item.modality, item.offset, item.length) for item in placed] == [("video", 1, 3), ("image", 5, 2)]


class TestOptions:
    CHANGES = (
        ({}, 6, 2),
        ({"mm_processor_kwargs": {"max_pixels": 4096}}, 2, 2),
        ({"mm_processor_kwargs": {"min_pixels": 8192}}, 12, 2),
        ({"media_io_kwargs": {"video": {"num_frames": 8}, "image": {}}}, 6, 4),
        ({"media_io_kwargs": {"video": {"fps": 4}}, "mm_processor_kwargs": {"fps": 4.0}}, 6, 4),
        ({"mm_processor_kwargs": {"fps": 8, "max_frames": 6}}, 6, 3),
        ({"mm_processor_kwargs": {"fps": 1, "min_frames": 6}, "media_io_kwargs": {"video": None}}, 6, 3),
        ({"mm_processor_kwargs": None, "media_io_kwargs": {}}, 6, 2),
    )

    async def test_they_change_what_is_made(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path) as s:
            for options, embeddings, frames in self.CHANGES:
                await chat(s, user(image_part(), video_part(film(16, 8))), **options)
                image, video = s.engine.submits[-1].media
                assert (image.embeddings, video.grid[0]) == (embeddings, frames), options
            # gRPC spells them as JSON.
            part = gateway_pb2.ContentPart(video_url=url(film(16, 8), "video/mp4"))
            await grpc_chat(s, part, media_io_kwargs_json='{"video": {"num_frames": 8}}')
            assert s.engine.submits[-1].media[0].grid[0] == 4
            for options, field in (
                ({"media_io_kwargs_json": '{"audio": {}}'}, "media_io_kwargs_json.audio"),
                ({"mm_processor_kwargs_json": "{"}, "mm_processor_kwargs_json"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await grpc_chat(s, part, **options)
                assert field in str(caught.value.details())

    WRONG = (
        ({"media_io_kwargs": []}, "media_io_kwargs"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs.audio"),
        ({"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs.image.mode"),
        ({"media_io_kwargs": {"video": 3}}, "media_io_kwargs.video"),
        ({"media_io_kwargs": {"video": {"frames": 3}}}, "media_io_kwargs.video.frames"),
        ({"media_io_kwargs": {"video": {"num_frames": -1}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"num_frames": True}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"fps": "2"}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"fps": 1001}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"fps": float("1e308")}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"num_frames": 10**6 + 1}}}, "media_io_kwargs.video.num_frames"),
        ({"mm_processor_kwargs": {"max_pixels": 2**26 + 1}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": "x"}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"size": {}}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"max_pixels": 1.5}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"fps": 2, "num_frames": 4}}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"min_pixels": 9000, "max_pixels": 5000}}, "mm_processor_kwargs"),
        (
            {"mm_processor_kwargs": {"fps": 2}, "media_io_kwargs": {"video": {"fps": 3}}},
            "media_io_kwargs.video.fps",
        ),
    )

    async def test_what_is_wrong_is_named_by_each_api(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path) as s:
            for options, field in self.WRONG:
                for path in ("/v1/chat/completions", "/tokenize"):
                    assert (await refused(s, user(video_part()), path, **options))["param"] == field
            for name in ("media_io_kwargs", "mm_processor_kwargs"):  # which need media
                assert (await refused(s, user("x"), **{name: {"video": {}}}))["param"] == name
                await chat(s, user("x"), **{name: {}})
            assert s.gateway.media.made == 0


class TestCuts:
    ITEMS = (MediaItem(b"a", "image", 4, 6, 6, (1, 4, 6)), MediaItem(b"b", "video", 12, 8, 6, (2, 4, 6)))

    @pytest.mark.parametrize(
        ("limit", "side", "offsets"),
        [
            (None, None, [4, 12]), (30, None, [4, 12]), (26, None, [0, 8]), (20, None, [2]), (18, "left", [0]),
            (10, None, []), (20, "right", [4, 12]), (12, "right", [4]), (4, "right", []),
            (25, None, None), (21, None, None), (17, None, None), (11, None, None), (19, "right", None),
            (13, "right", None), (9, "right", None), (5, "right", None),
        ],
    )  # fmt: skip
    def test_a_cut_drops_whole_items_or_is_refused(
        self, limit: int | None, side: str | None, offsets: list[int] | None
    ) -> None:
        if offsets is not None:
            assert [item.offset for item in cut(self.ITEMS, 30, limit, side, "f")] == offsets
            return
        with pytest.raises(InvalidArgument, match="cut through the") as caught:
            cut(self.ITEMS, 30, limit, side, "f")
        assert caught.value.field == "f"

    async def test_a_prompt_is_cut_beside_its_media(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path) as s:
            messages = user("a long story of ", image_part(), " and ", image_part(png(64, 64)), "!")
            whole = asked("a long story of ", PICTURE, " and ", seen(4), "!")
            await chat(s, messages, truncate_prompt_tokens=len(whole) - 20)
            await chat(s, messages, truncate_prompt_tokens=len(whole) - 30)
            for submit, dropped, left in zip(s.engine.submits, (20, 30), (2, 1), strict=True):
                assert ids_of(submit) == whole[dropped:]
                assert len(submit.media) == left
                for item in submit.media:
                    assert {ids_of(submit)[item.offset], ids_of(submit)[item.offset + item.length - 1]} == {IMAGE}
            error = await refused(s, messages, truncate_prompt_tokens=len(whole) - whole.index(IMAGE) - 1)
            assert error["param"] == "truncate_prompt_tokens"
            assert pinned(s) == 0


class TestPins:
    """A blob is held from when it was made until its request has ended, however that comes about."""

    async def running(self, s: Any, **more: Any) -> asyncio.Task[httpx.Response]:
        count = len(s.engine.submits)
        body = {"messages": user(image_part(), video_part()), **more}
        task = asyncio.create_task(s.http.post("/v1/chat/completions", json=body))
        await until(lambda: len(s.engine.submits) > count)
        assert pinned(s) == 2
        return task

    async def test_it_ends_by_itself_or_is_aborted(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path, seeing_engine(held=True)) as s:
            task = await self.running(s, n=2)
            s.engine.held = False
            assert len((await task).json()["choices"]) == 2
            assert pinned(s) == 0
            s.engine.held = True
            task = await self.running(s)
            token = s.engine.submits[-1].token
            assert (await s.stub.Abort(gateway_pb2.AbortRequest(token=token))).found
            assert (await task).status_code == 200
            assert pinned(s) == 0

    async def test_its_client_leaves(self, tmp_path: Path) -> None:
        async with seeing_stack(tmp_path, seeing_engine(held=True)) as s:
            for stream in (False, True):
                task = await self.running(s, stream=stream)
                task.cancel()
                await until(lambda: pinned(s) == 0)

    async def test_it_is_refused_or_fails(self, tmp_path: Path) -> None:
        failure = common_pb2.Failure(code=8, message="full")
        async with seeing_stack(tmp_path, seeing_engine(refuse=failure)) as s:
            answer = await s.http.post("/v1/chat/completions", json={"messages": user(image_part())})
            assert (answer.status_code, pinned(s)) == (429, 0)
            for wrong in (
                {"min_tokens": 9, "max_tokens": 5},
                {"logit_bias": {"9999": 1}},
                {"bad_words": ["x"], "n": 99},
            ):
                await refused(s, user(image_part()), **wrong)
                assert pinned(s) == 0
            await refused(s, user(*[image_part()] * 64), mm_processor_kwargs={"min_pixels": 65_000})
            await refused(s, user(image_part(), image_part(b"broken")))
            s.gateway.front.draining = True
            answer = await s.http.post("/v1/chat/completions", json={"messages": user(image_part())})
            assert (answer.status_code, pinned(s)) == (503, 0)

    async def test_its_engine_is_lost_and_back(self, tmp_path: Path) -> None:
        engine = seeing_engine(held=True)
        async with seeing_stack(tmp_path, engine) as s:
            task = await self.running(s)
            engine.step()
            first = engine.submits[0]
            await engine.kill()
            await until(lambda: not s.gateway.router.attached)
            assert pinned(s) == 2
            await engine.start()
            await until(lambda: len(engine.submits) == 2)
            assert list(engine.submits[1].media) == list(first.media)
            assert pinned(s) == 2
            engine.held = False
            assert (await task).json()["choices"][0]["message"]["content"] == "hello world"
            assert pinned(s) == 0
