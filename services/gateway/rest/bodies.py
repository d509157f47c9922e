"""JSON schemas of the fields that the table leaves open: messages, items, prompts, tools, formats."""

from __future__ import annotations

from services.gateway.fields import Api, accepted
from services.gateway.limits import DEFAULT_LIMITS as LIMITS
from services.gateway.media import options
from services.gateway.parts import DETAILS
from services.gateway.rest.schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NAME,
    NULL,
    OBJECT,
    STRING,
    TOKEN_ID,
    Schema,
    array,
    either,
    nullable,
    of_kind,
    only,
    ref,
    some,
)

_EMPTY: Schema = {"enum": [None, "", [], {}, False, 0]}
_FUNCTION: Schema = {"const": "function"}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_OFFERED = (
    {"name": _FUNCTION_NAME},
    {"description": nullable(STRING), "parameters": nullable(OBJECT), "strict": nullable(BOOLEAN)},
)
_TOKENS: Schema = array(TOKEN_ID, minItems=1)

# Conversations

_UUID: Schema = {"type": ["string", "null"], "minLength": 1, "maxLength": LIMITS.media_name}
_DETAIL: Schema = {"enum": [*DETAILS, None]}


def _url_part(kind: str, marks: dict[str, Schema]) -> Schema:
    """A part with a URL; only a uuid makes that one needless."""
    named = either(only({}, {"url": nullable(STRING), **marks}), NULL)
    return either(
        only({"type": {"const": kind}, kind: only({"url": NAME}, marks)}, {"uuid": _UUID}),
        only({"type": {"const": kind}, "uuid": {**_UUID, "type": "string"}}, {kind: named}),
    )


_ROLE: Schema = either({"enum": ["system", "developer", "user", "assistant", "tool"]}, NAME)
_CALLED: Schema = only({"name": NAME}, {"arguments": {"type": ["string", "object", "null"]}})
_MESSAGE: Schema = only(
    {"role": _ROLE},
    {
        "content": either(STRING, array(ref("ContentPart")), NULL),
        "tool_calls": either(array(ref("ToolCall")), NULL),
        "tool_call_id": nullable(STRING),
        "name": nullable(STRING),
        **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), nullable(STRING)),
        **dict.fromkeys(("refusal", "audio", "function_call", "annotations"), _EMPTY),
    },
)

# Items of /v1/responses

_MARKS = dict.fromkeys(("id", "status"), ANYTHING)
_BLANK = dict.fromkeys(("phase", "encrypted_content", "namespace", "caller"), _EMPTY)


def _item(kind: str, required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return only({"type": {"const": kind}, **required}, {**(optional or {}), **_MARKS, **_BLANK})


def _part(kind: str, key: str, *marks: str) -> Schema:
    return only({"type": {"const": kind}, key: STRING}, {**dict.fromkeys(marks, ANYTHING), **_BLANK})


def _spoken(parts: Schema, *roles: str) -> Schema:
    said: dict[str, Schema] = {"role": {"enum": [*roles]}, "content": either(STRING, array(parts))}
    return only(said, {"type": {"const": "message"}, **_MARKS, **_BLANK})


_INPUT_TEXT = _part("input_text", "text")
_IMAGE_MARKS = {"detail": _DETAIL, "file_id": NULL}
_INPUT_IMAGE = either(
    only({"type": {"const": "input_image"}, "image_url": NAME}, {"uuid": _UUID, **_IMAGE_MARKS}),
    only(
        {"type": {"const": "input_image"}, "uuid": {**_UUID, "type": "string"}},
        {"image_url": nullable(STRING), **_IMAGE_MARKS},
    ),
)
_ANSWERED = either(_part("output_text", "text", "annotations", "logprobs"), _part("refusal", "refusal"))
_THOUGHT = {
    "summary": either(STRING, array(_part("summary_text", "text")), NULL),
    "content": either(STRING, array(_part("reasoning_text", "text")), NULL),
}

# What the output must be

_FORMAT_NAME = {"name": _FUNCTION_NAME, "schema": ANYTHING}
_FORMAT_NOTES = {"description": nullable(STRING), "strict": nullable(BOOLEAN)}
_PLAIN: Schema = only({"type": {"enum": ["text", "json_object"]}})
_JSON_SCHEMA: Schema = {"const": "json_schema"}


def _numbers(names: tuple[str, ...]) -> dict[str, Schema]:
    kinds: dict[str, Schema] = {"fps": {"type": ["number", "null"], "exclusiveMinimum": 0}}
    whole: Schema = {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 2**31}
    return {name: kinds.get(name, whole) for name in names}


COMPONENTS: dict[str, Schema] = {
    "TokenId": {"type": "integer", "minimum": 0, "description": "An id of the model's vocabulary."},
    "ContentPart": either(
        STRING,
        only({"type": {"const": "text"}, "text": STRING}),
        _url_part("image_url", {"detail": _DETAIL}),
        _url_part("video_url", {}),
    ),
    "ToolCall": only({"function": _CALLED}, {"id": nullable(STRING), "type": _FUNCTION, "index": nullable(INTEGER)}),
    "Message": _MESSAGE,
    "Messages": array(ref("Message"), minItems=1, maxItems=LIMITS.messages),
    "Prompt": either(STRING, _TOKENS, array(either(STRING, _TOKENS), minItems=1, maxItems=LIMITS.prompts)),
    "EmbeddingInput": either(NAME, _TOKENS, array(either(NAME, _TOKENS), minItems=1, maxItems=LIMITS.inputs)),
    "InputItem": either(
        _spoken(either(_INPUT_TEXT, _INPUT_IMAGE), "user"),
        _spoken(_INPUT_TEXT, "system", "developer"),
        _spoken(_ANSWERED, "assistant"),
        _item("reasoning", {}, _THOUGHT),
        _item("function_call", {"call_id": NAME, "name": NAME, "arguments": STRING}),
        _item(
            "function_call_output",
            {"call_id": NAME, "output": either(STRING, array(either(_INPUT_TEXT, _INPUT_IMAGE)))},
        ),
    ),
    "Input": either(STRING, array(ref("InputItem"), minItems=1, maxItems=LIMITS.messages)),
    "MediaReading": only(
        {}, {modality: either(only({}, _numbers(keys)), NULL) for modality, keys in options.READING.items()}
    ),
    "MediaProcessing": only({}, _numbers(options.PROCESSING)),
    "Tool": only({"type": _FUNCTION, "function": only(*_OFFERED)}),
    "ResponseTool": only({"type": _FUNCTION, **_OFFERED[0]}, _OFFERED[1]),
    "ToolChoice": either(
        {"enum": ["none", "auto", "required"]}, only({"type": _FUNCTION, "function": only({"name": STRING})})
    ),
    "ResponseToolChoice": either({"enum": ["none", "auto", "required"]}, only({"type": _FUNCTION, "name": STRING})),
    "ResponseFormat": either(_PLAIN, only({"type": _JSON_SCHEMA, "json_schema": only(_FORMAT_NAME, _FORMAT_NOTES)})),
    "TextFormat": either(_PLAIN, only({"type": _JSON_SCHEMA, **_FORMAT_NAME}, _FORMAT_NOTES)),
    "StructuredOutputs": only(
        {},
        {
            "json": ANYTHING,
            "json_object": {"enum": [True, None]},
            "regex": nullable(STRING),
            "choice": either(array(STRING, minItems=1), NULL),
            "grammar": nullable(STRING),
            **dict.fromkeys(
                ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), nullable(BOOLEAN)
            ),
        },
    ),
}
"""What a kind leaves open."""

OPEN: dict[str, dict[Api, Schema]] = {
    "messages": {Api.ANY: ref("Messages")},
    "n": {Api.ANY: {"type": "integer", "minimum": 1}},
    "prompt": {Api.COMPLETIONS: ref("Prompt"), Api.TOKENIZE: STRING},
    "input": {Api.EMBEDDINGS: ref("EmbeddingInput"), Api.RESPONSES: ref("Input")},
    "media_io_kwargs": {Api.ANY: ref("MediaReading")},
    "mm_processor_kwargs": {Api.ANY: ref("MediaProcessing")},
    "documents": {Api.ANY: array(OBJECT)},
    "tools": {
        Api.CHAT | Api.TOKENIZE: array(ref("Tool"), maxItems=LIMITS.tools),
        Api.RESPONSES: array(ref("ResponseTool"), maxItems=LIMITS.tools),
    },
    "tool_choice": {Api.CHAT: ref("ToolChoice"), Api.RESPONSES: ref("ResponseToolChoice")},
    "response_format": {Api.ANY: ref("ResponseFormat")},
    "structured_outputs": {Api.ANY: ref("StructuredOutputs")},
    "text": {Api.ANY: only({}, {"format": either(ref("TextFormat"), NULL), "verbosity": {"enum": ["medium", None]}})},
    "reasoning": {Api.ANY: some({}, {"effort": nullable(of_kind(accepted(Api.CHAT)["reasoning_effort"].kind))})},
}
"""The fields that take anything, by name and by call."""
