"""/v1/embeddings: vectors as numbers, or as base64 of little-endian float32."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Mapping

import orjson

from services.gateway import embeddings
from services.gateway.fields import Api, read_fields
from services.gateway.front import Front
from services.gateway.models import Model
from services.gateway.text import Envelope

_SWAP = sys.byteorder == "big"


async def answer(
    front: Front, model: Model, values: Mapping[str, object], envelope: Envelope, *, arrived: float
) -> bytes:
    """The document that answers a body. Each vector is written as it comes, so that none waits for a long list."""
    with front.arrival():
        asked = read_fields(values, Api.EMBEDDINGS)
        inputs = await embeddings.read(model, asked, envelope)
    shape = _FORMATS[asked.encoding_format or "float"]
    vectors = await embeddings.embed(front, model, inputs, shape, arrived=arrived)
    items = [
        b'{"object":"embedding","index":%d,"embedding":' % index + vector + b"}" for index, vector in enumerate(vectors)
    ]
    tokens = inputs.usage.prompt_tokens
    tail = {"model": model.info.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return b'{"object":"list","data":[' + b",".join(items) + b"]," + orjson.dumps(tail)[1:]


def _numbers(vector: array[float]) -> bytes:
    return orjson.dumps(vector.tolist())


def _base64(vector: array[float]) -> bytes:
    if _SWAP:
        vector = vector[:]
        vector.byteswap()
    return b'"' + base64.b64encode(vector.tobytes()) + b'"'


_FORMATS: Mapping[str, Callable[[array[float]], bytes]] = {"float": _numbers, "base64": _base64}
