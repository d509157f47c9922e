"""Parts that are images and videos, as each API spells them: order, names, and bad input by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from protos import gateway_pb2
from services.common.errors import InvalidArgument
from services.gateway import toolless
from services.gateway.chat import ChatTemplate, Conversation
from services.gateway.messages import Message, ToolCall, read_messages
from services.gateway.parts import MediaPart
from services.gateway.rest import openapi
from services.gateway.rest.responses.items import read_input
from services.gateway.service import reading
from services.gateway.tools import Tool

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
AT = "messages[0].content"


def image(url: str = "data:x", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def of_chat(content: object, role: str = "user", **more: object) -> Message:
    return read_messages([{"role": role, "content": content, **more}])[0]


def test_parts_keep_their_order_and_text_is_joined_as_ever() -> None:
    video = {"type": "video_url", "video_url": {"url": "https://h/v"}, "uuid": "v"}
    message = of_chat(["a", image("https://h/i"), {"type": "text", "text": "b"}, video, "c"])
    assert message.text == "a\nb\nc"
    assert message.content == (
        "a",
        MediaPart("image", "https://h/i", f"{AT}[1]"),
        "b",
        MediaPart("video", "https://h/v", f"{AT}[3]", "v"),
        "c",
    )
    assert [part["type"] for part in message.for_template(parts=False)["content"]] == [
        "text", "image", "text", "video", "text",
    ]  # fmt: skip
    assert of_chat(["a", "b"]) == Message("user", "a\nb")
    assert of_chat([image()]).text == ""


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_details_of_openai_are_taken(detail: str | None) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:x", "detail": detail}}
    assert of_chat([part]).content == (MediaPart("image", "data:x", f"{AT}[0]"),)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": detail}]}
    assert read_input([item])[0].content == (MediaPart("image", "data:x", "input[0].content[0]"),)


@pytest.mark.parametrize("named", [{}, {"image_url": None}, {"image_url": {}}, {"image_url": {"url": ""}}])
def test_a_uuid_makes_a_url_needless(named: dict[str, Any]) -> None:
    part = {"type": "image_url", "uuid": "u", **named}
    assert of_chat([part]).content == (MediaPart("image", "", f"{AT}[0]", "u"),)
    flat = {"type": "input_image", "uuid": "u", "image_url": None if named.get("image_url") is None else ""}
    message = read_input([{"role": "user", "content": [flat]}])[0]
    assert message.content == (MediaPart("image", "", "input[0].content[0]", "u"),)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": "data:x"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}, "uuid": "u"}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "\ud800"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "best"}}, "image_url.detail"),
        ({"type": "video_url", "video_url": {"url": "x", "detail": "auto"}}, "video_url.detail"),
        ({"type": "image_url", "image_url": {"url": "x", "size": 1}}, "image_url.size"),
        ({"type": "image_url", "image_url": {"url": "x"}, "cache": 1}, "cache"),
        ({"type": "image_url", "image_url": {"url": "x"}, "uuid": ""}, "uuid"),
        ({"type": "image_url", "image_url": {"url": "x"}, "uuid": 7}, "uuid"),
        ({"type": "image_url", "image_url": {"url": "x"}, "uuid": "u" * 257}, "uuid"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ""),
        ({"type": "audio_url", "audio_url": {"url": "data:x"}}, ""),
        ({"type": "input_image", "image_url": "x"}, ""),
        ({"type": "file", "file": {"file_id": "f"}}, ""),
    ],
)
def test_a_bad_part_of_a_chat_is_named(part: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        of_chat(["x", part])
    assert caught.value.field == (f"{AT}[1].{field}" if field else f"{AT}[1]")


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_image", "image_url": {"url": "x"}}, "image_url"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image", "image_url": "x", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image", "image_url": "x", "detail": "original"}, "detail"),
        ({"type": "input_image", "image_url": "x", "size": 1}, "size"),
        ({"type": "input_file", "file_id": "f"}, ""),
        ({"type": "input_audio", "data": "x"}, ""),
        ({"type": "image_url", "image_url": {"url": "x"}}, ""),
    ],
)
def test_a_bad_part_of_a_response_is_named(part: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_input([{"role": "user", "content": [part]}])
    where = "input[0].content[0]"
    assert caught.value.field == (f"{where}.{field}" if field else where)


GOOD = [
    image(), image(uuid="u"), image(uuid=None), {"type": "image_url", "uuid": "u"},
    {"type": "image_url", "image_url": None, "uuid": "u"}, {"type": "image_url", "image_url": {"url": ""}, "uuid": "u"},
    {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
    {"type": "image_url", "image_url": {"url": "data:x", "detail": None}},
    {"type": "video_url", "video_url": {"url": "https://h/v"}}, "text", {"type": "text", "text": "x"},
]  # fmt: skip
BAD = [
    {"type": "image_url"}, {"type": "image_url", "image_url": "data:x"},
    {"type": "image_url", "image_url": {"url": ""}}, {"type": "image_url", "image_url": {"url": "x", "detail": "best"}},
    image(uuid=""), image(uuid=3), image(size=1),
    {"type": "video_url", "video_url": {"url": "x", "detail": "auto"}}, {"type": "image_url", "image_url": {"url": 5}},
    {"type": "input_audio", "input_audio": {}}, {"type": "audio_url", "audio_url": {"url": "x"}},
]  # fmt: skip


def test_the_description_of_parts_holds() -> None:
    """What is taken fits its schema, what is refused does not; of /v1/responses too."""
    components = json.loads(openapi.document("1"))["components"]

    def fits(name: str, value: object) -> bool:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        return Draft202012Validator(schema).is_valid(value)

    for part in GOOD:
        of_chat([part])
        assert fits("ContentPart", part), part
    for part in BAD:
        with pytest.raises(InvalidArgument):
            of_chat([part])
        assert not fits("ContentPart", part), part
    for part in [*GOOD, *BAD]:
        if not isinstance(part, dict) or part["type"] != "image_url":
            continue
        named = part.get("image_url")
        flat = {**part, "type": "input_image", **(named if isinstance(named, dict) else {})}
        flat["image_url"] = named.get("url") if isinstance(named, dict) else named
        flat.pop("url", None)
        item = {"role": "user", "content": [flat]}
        try:
            read_input([item])
            taken = True
        except InvalidArgument:
            taken = False
        assert fits("InputItem", item) == taken, item


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "function"])
def test_media_in_the_turn_of_somebody_who_shows_none_are_refused(role: str) -> None:
    with pytest.raises(InvalidArgument, match=f"not of {role}") as caught:
        of_chat(["look", image()], role)
    assert caught.value.field == f"{AT}[1]"
    content = [gateway_pb2.ContentPart(text="look"), gateway_pb2.ContentPart(image_url="data:x")]
    with pytest.raises(InvalidArgument, match=f"not of {role}"):
        reading.turns([gateway_pb2.ChatMessage(role=role, content=content)])
    if role in ("system", "developer"):
        with pytest.raises(InvalidArgument, match=f"not of {role}"):
            read_input([{"role": role, "content": [{"type": "input_image", "image_url": "data:x"}]}])


def test_a_message_with_media_cannot_be_continued() -> None:
    template = ChatTemplate(TEMPLATE)
    with pytest.raises(InvalidArgument, match="without calls and media") as caught:
        template.render(Conversation((of_chat(["x", image()]),), continue_final_message=True))
    assert caught.value.field == "continue_final_message"
    turns = (of_chat(["x", image()]), Message("assistant", "so"))
    assert template.render(Conversation(turns, continue_final_message=True)) == "[user]x<image>[assistant]so"


def test_grpc_parts_are_the_same_parts() -> None:
    parts = [
        gateway_pb2.ContentPart(text="a"),
        gateway_pb2.ContentPart(image_url="https://h/i", uuid="u"),
        gateway_pb2.ContentPart(video_url="data:x"),
        gateway_pb2.ContentPart(image_hash=b"i" * 32),
        gateway_pb2.ContentPart(video_hash=b"v" * 32, uuid="w"),
        gateway_pb2.ContentPart(image_url="", uuid="u"),
    ]
    (turn,) = reading.turns([gateway_pb2.ChatMessage(role="user", content=parts)])
    assert turn.text == "a"
    assert turn.content == (
        "a",
        MediaPart("image", "https://h/i", f"{AT}[1]", "u"),
        MediaPart("video", "data:x", f"{AT}[2]"),
        MediaPart("image", b"i" * 32, f"{AT}[3]"),
        MediaPart("video", b"v" * 32, f"{AT}[4]", "w"),
        MediaPart("image", "", f"{AT}[5]", "u"),
    )


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (gateway_pb2.ContentPart(), ""),
        (gateway_pb2.ContentPart(image_url=""), ".image_url"),
        (gateway_pb2.ContentPart(image_hash=b"short"), ".image_hash"),
        (gateway_pb2.ContentPart(text="x", uuid="u"), ".uuid"),
        (gateway_pb2.ContentPart(image_url="x", uuid=""), ".uuid"),
    ],
)
def test_a_bad_grpc_part_is_named(part: gateway_pb2.ContentPart, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        reading.turns([gateway_pb2.ChatMessage(role="user", content=[part])], "messages.messages")
    assert caught.value.field == f"messages.messages[0].content[0]{field}"


def test_tools_that_are_told_in_turns_leave_media_in_their_places() -> None:
    template = ChatTemplate(TEMPLATE)
    call = ToolCall("see", "{}", "c1")
    turns = [
        of_chat(["look: ", image(), " there"]),
        Message("assistant", "", (call, call)),
        of_chat([image(), "one"], "tool", tool_call_id="c1"),
        Message("tool", "two", tool_call_id="c1"),
    ]
    told = toolless.tell(turns)
    shown = template.render(Conversation((told[0], told[2]), add_generation_prompt=False))
    assert shown == (
        "[user]look: <image> there[user]<tool_response>\n<image>one\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response>"
    )
    offered = toolless.offer(turns[:1], [Tool("see", None, None, False)], system=False)
    text = template.render(Conversation(offered, add_generation_prompt=False))
    assert text.startswith("[user]# Tools")
    assert text.endswith("</tool_call>\n\nlook: <image> there")
