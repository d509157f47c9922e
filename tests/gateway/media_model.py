"""The byte model with eyes: the text files of a Qwen3-VL over bytes, an engine that takes media, and media for it.

Sizes can be computed by hand: a patch has 16 pixels a side, an embedding 2 x 2 patches, a step in time 2 frames. So
an image of 96 x 64 is 4 x 6 patches and 6 embeddings.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from protos import engine_pb2, gateway_pb2
from tests.gateway.fake_engine import FakeEngine, text_files
from tests.gateway.stack import Stack, gateway_stack

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, VISION, NOISIV, IMAGE, VIDEO = range(258, 264)
TEMPLATE = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}
{%- elif m.role != 'tool' %}
    {%- for part in m.content %}
        {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- elif part.type == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
        {%- elif 'text' in part %}{{- part.text }}{%- endif %}
    {%- endfor %}
{%- endif %}
{%- for call in m.tool_calls %}{{- call.function | tojson }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if note %}{{- note }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""As Qwen3-VL has it, shorter. It shows no media in a tool's turn."""
Body = dict[str, Any]
_PIXELS = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@functools.cache
def _files() -> dict[str, bytes]:
    files = text_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    files["tokenizer.json"] = tokenizer.to_str().encode()
    for name, content in {
        "config.json": {"model_type": "qwen3_vl", "eos_token_id": 257},
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": TEMPLATE},
        "preprocessor_config.json": {"size": {"shortest_edge": 1024, "longest_edge": 65536}, **_PIXELS},
        "video_preprocessor_config.json": {"size": {"shortest_edge": 4096, "longest_edge": 131072}, **_PIXELS},
    }.items():
        files[name] = json.dumps(content).encode()
    return files


def seeing_engine(**changes: Any) -> FakeEngine:
    """An engine whose worker takes images and videos."""
    capabilities = changes.pop("capabilities", ("generate", "prompt_logprobs", "embed", "image", "video"))
    return FakeEngine(files=_files(), capabilities=capabilities, context=4096, vocab_size=264, **changes)


@contextlib.asynccontextmanager
async def seeing_stack(folder: Path, engine: FakeEngine | None = None, **knobs: object) -> AsyncIterator[Stack]:
    """A gateway with one real media process, whose blobs lie in `folder`."""
    knobs = {"media_dir": str(folder / "blobs"), "media_processes": 1, **knobs}
    async with gateway_stack(engine or seeing_engine(), **knobs) as stack:
        yield stack


def png(width: int = 96, height: int = 64, seed: int = 0, kind: str = "PNG") -> bytes:
    """A picture; another one for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind)
    return data.getvalue()


@functools.cache
def film(frames: int = 4, rate: int = 2, width: int = 64, height: int = 64) -> bytes:
    """A video of so many frames a second."""
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            pixels = np.full((height, width, 3), index * 20 % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return data.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(png() if data is None else data)}, **more}


def video_part(data: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url(data or film(), "video/mp4")}, **more}


def user(*content: str | dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


def grpc_turns(*parts: gateway_pb2.ContentPart) -> list[gateway_pb2.ChatMessage]:
    return [gateway_pb2.ChatMessage(role="user", content=parts)]


def ids_of(submit: engine_pb2.Submit) -> list[int]:
    return array("i", submit.prompt_id_i32le).tolist()


def spelled(*pieces: str | list[int]) -> list[int]:
    """Ids: of text its bytes."""
    return [token for piece in pieces for token in (piece.encode() if isinstance(piece, str) else piece)]


def asked(*pieces: str | list[int]) -> list[int]:
    """The prompt of a user's turn with that content."""
    return spelled([START], "user\n", *pieces, [END], "\n", [START], "assistant\n")


def seen(embeddings: int) -> list[int]:
    """An image of so many embeddings."""
    return [VISION, *[IMAGE] * embeddings, NOISIV]


PICTURE = seen(6)
"""What stands for `png()`."""
FILM = spelled(
    [VISION], "<0.2 seconds>", [VISION, *[VIDEO] * 4, NOISIV], "<1.2 seconds>", [VISION, *[VIDEO] * 4, NOISIV], [NOISIV]
)
"""What stands for `film()`: 4 frames at 0, 0.5, 1 and 1.5 s, two and two of them in a step of 4 x 4 patches."""


def pinned(stack: Stack) -> int:
    """Blobs that requests hold."""
    store = stack.gateway.media.store
    return 0 if store is None else store.pinned


async def chat(stack: Stack, messages: list[Body], **more: Any) -> Body:
    answer = await stack.http.post("/v1/chat/completions", json={"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    body: Body = answer.json()
    return body


async def refused(stack: Stack, messages: list[Body], path: str = "/v1/chat/completions", **more: Any) -> Body:
    answer = await stack.http.post(path, json={"messages": messages, **more})
    assert answer.status_code == 400, answer.text
    error: Body = answer.json()["error"]
    return error


async def grpc_chat(stack: Stack, *parts: gateway_pb2.ContentPart, **more: Any) -> list[gateway_pb2.ChatResponse]:
    request = gateway_pb2.ChatRequest(messages=grpc_turns(*parts), **more)
    return [message async for message in stack.stub.Chat(request)]


async def upload(stack: Stack, *pieces: bytes, sha256: bytes | None = None, at: int = 0) -> bytes:
    requests = [gateway_pb2.UploadMediaRequest(data=piece) for piece in pieces]
    if sha256 is not None:
        requests[at].sha256 = sha256
    answer: gateway_pb2.UploadMediaResponse = await stack.stub.UploadMedia(iter(requests))
    return answer.sha256
