"""The description of the HTTP server (OpenAPI 3.1), made from the table of routes and the table of fields."""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.fields import REFUSED, Api, accepted
from services.gateway.kinds import Anything
from services.gateway.rest import answers, bodies, schemas
from services.gateway.rest.routes import DESCRIPTION, ROUTES, Row
from services.gateway.rest.schemas import Schema, either, nullable, ref

_NAMES = {
    Api.CHAT: "ChatCompletionRequest",
    Api.COMPLETIONS: "CompletionRequest",
    Api.TOKENIZE: "TokenizeRequest",
    Api.DETOKENIZE: "DetokenizeRequest",
    Api.RESPONSES: "ResponseRequest",
    Api.EMBEDDINGS: "EmbeddingRequest",
}
_NEEDED = {
    Api.CHAT: ("messages",),
    Api.COMPLETIONS: ("prompt",),
    Api.DETOKENIZE: ("tokens",),
    Api.RESPONSES: ("input",),
    Api.EMBEDDINGS: ("input",),
}
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "No model has that name.",
    413: "The body is too long.",
    429: "Too much is being served; `Retry-After` says when to try again.",
    500: "A fault of the server; the message has an id that also stands in its log.",
    503: "Nothing can be served now; `Retry-After` says when to try again.",
    504: "The request's time ran out.",
}
_JSON = "application/json"


def document(version: str) -> bytes:
    """The description as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for row in ROUTES:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row)
    taken = {_NAMES[row.takes]: body(row.takes) for row in ROUTES if row.takes is not None}
    components = {**taken, **bodies.COMPONENTS, **answers.COMPONENTS}
    info = {"title": "Triptych", "version": version, "description": "OpenAI's API, and what belongs to it."}
    return orjson.dumps(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": dict(sorted(components.items()))}}
    )


def body(api: Api) -> Schema:
    """The schema of a request body. Null is the same as unset."""
    needed = _NEEDED.get(api, ())
    properties: dict[str, Schema] = {}
    for row in REFUSED:
        if api in row.apis and row.neutral:
            note = "Not supported by this server: these values ask for nothing."
            properties[row.name] = {"enum": [*row.neutral, None], "description": note}
    for name, field in accepted(api).items():
        schema = _open(name, api) if isinstance(field.kind, Anything) else schemas.of_kind(field.kind)
        properties[name] = {**(schema if name in needed else nullable(schema)), "description": field.meaning}
    required = {name: properties.pop(name) for name in needed}
    return schemas.only(required, properties)


def _open(name: str, api: Api) -> Schema:
    return next(schema for apis, schema in bodies.OPEN[name].items() if api in apis)


def _operation(row: Row) -> Schema:
    operation: Schema = {"operationId": row.operation, "summary": row.summary, "responses": _responses(row)}
    if "{model}" in row.path:
        name = {"name": "model", "in": "path", "required": True, "schema": schemas.STRING}
        operation["parameters"] = [{**name, "description": "Name of the model; it may hold slashes."}]
    if row.takes is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": ref(_NAMES[row.takes])}}}
    return operation


def _responses(row: Row) -> Schema:
    if row == DESCRIPTION:
        return {"200": _answer("The description.", {_JSON: {"schema": schemas.OBJECT}})}
    if row.operation == "metrics":
        return {"200": _answer("The metrics.", {"text/plain": {"schema": schemas.STRING}})}
    content = {_JSON: {"schema": ref(answers.WHOLE[row.operation])}}
    if row.operation in answers.EVENTS:
        content["text/event-stream"] = {"schema": _events(answers.EVENTS[row.operation])}
    responses = {"200": _answer("The answer.", content)}
    if row.operation in ("ready", "health"):
        responses["503"] = _answer("What is missing.", {_JSON: {"schema": ref("NotReady")}})
    for status in _statuses(row):
        responses[str(status)] = _answer(_ERRORS[status], {_JSON: {"schema": ref("Error")}})
    return responses


def _statuses(row: Row) -> tuple[int, ...]:
    if row.takes is not None:
        return tuple(_ERRORS)
    return {"models": (500,), "model": (404, 500, 503)}.get(row.operation, ())


def _answer(description: str, content: Schema) -> Schema:
    return {"description": description, "content": content}


def _events(name: str) -> Schema:
    """Before OpenAPI 3.2 the schema of a stream is by custom that of each event."""
    document = {"contentMediaType": _JSON, "contentSchema": either(ref(name), ref("Error"))}
    return {
        "type": "object",
        "description": "Each event, where `stream` is true. Events without names end with [DONE].",
        "properties": {"event": schemas.STRING, "data": either({"const": "[DONE]"}, {"type": "string", **document})},
        "required": ["data"],
    }
