"""JSON schemas of what the API answers. Strict: a key that is not here is in no answer."""

from __future__ import annotations

from services.gateway.rest import response_answers
from services.gateway.rest.schemas import INTEGER, NULL, STRING, Schema, array, either, nullable, only, ref

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls", "abort", "error"]}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_IDS: Schema = array(_COUNT)


def _const(value: str) -> Schema:
    return {"const": value}


def _head(kind: str) -> dict[str, Schema]:
    return {"id": STRING, "object": _const(kind), "created": _COUNT, "model": STRING}


_TOKEN = {"token": STRING, "logprob": _NUMBER, "bytes": array({"type": "integer", "minimum": 0})}
_CALLED = only({"name": STRING, "arguments": STRING})
_PROMPT = {"prompt_token_ids": _IDS, "prompt_logprobs": array(nullable(ref("TokensById")))}
_CHAT_END = {"logprobs": nullable(ref("ChatLogprobs")), "finish_reason": _FINISH, "stop_reason": _STOP_REASON}
_DELTA = {
    "role": _const("assistant"),
    "content": nullable(STRING),
    "reasoning_content": STRING,
    "tool_calls": array(
        only(
            {"index": _COUNT, "function": only({"arguments": STRING}, {"name": STRING})},
            {"id": STRING, "type": _const("function")},
        )
    ),
}
_TEXT_CHOICE = {
    "index": _COUNT,
    "text": STRING,
    "logprobs": nullable(ref("CompletionLogprobs")),
    "finish_reason": nullable(_FINISH),
    "stop_reason": _STOP_REASON,
}

COMPONENTS: dict[str, Schema] = {
    "Error": only(
        {
            "error": only(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": {"type": ["string", "null"], "description": "The field at fault."},
                    "code": STRING,
                }
            )
        }
    ),
    "Usage": only(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": only({"cached_tokens": _COUNT}),
            "completion_tokens_details": only({"reasoning_tokens": _COUNT}),
        }
    ),
    "TokensById": {
        "type": "object",
        "additionalProperties": only({"logprob": _NUMBER, "rank": nullable(INTEGER), "decoded_token": STRING}),
    },
    "ChatLogprobs": only(
        {"content": array(only({**_TOKEN, "top_logprobs": array(only(_TOKEN))})), "refusal": NULL},
    ),
    "ChatMessage": only(
        {"role": _const("assistant"), "content": nullable(STRING), "refusal": NULL},
        {
            "reasoning_content": STRING,
            "tool_calls": array(only({"id": STRING, "type": _const("function"), "function": _CALLED})),
        },
    ),
    "ChatCompletion": only(
        {
            **_head("chat.completion"),
            "choices": array(
                only({"index": _COUNT, "message": ref("ChatMessage"), **_CHAT_END}, {"token_ids": _IDS}), minItems=1
            ),
            "usage": ref("Usage"),
        },
        _PROMPT,
    ),
    "ChatCompletionChunk": only(
        {
            **_head("chat.completion.chunk"),
            "choices": array(
                only(
                    {
                        "index": _COUNT,
                        "delta": only({}, _DELTA),
                        "logprobs": _CHAT_END["logprobs"],
                        "finish_reason": nullable(_FINISH),
                    },
                    {"stop_reason": _STOP_REASON, "token_ids": _IDS},
                )
            ),
        },
        {"usage": nullable(ref("Usage")), **_PROMPT},
    ),
    "CompletionLogprobs": only(
        {
            "tokens": array(STRING),
            "token_logprobs": array(nullable(_NUMBER)),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": _IDS,
        }
    ),
    "Completion": only(
        {
            **_head("text_completion"),
            "choices": array(only(_TEXT_CHOICE, {"token_ids": _IDS, **_PROMPT}), minItems=1),
            "usage": ref("Usage"),
        }
    ),
    "CompletionChunk": only(
        {**_head("text_completion"), "choices": array(only(_TEXT_CHOICE, {"token_ids": _IDS, **_PROMPT}))},
        {"usage": nullable(ref("Usage"))},
    ),
    "Model": only(
        {
            **{name: schema for name, schema in _head("model").items() if name != "model"},
            "owned_by": STRING,
            "root": STRING,
            "parent": NULL,
            "max_model_len": _COUNT,
        }
    ),
    "Models": only({"object": _const("list"), "data": array(ref("Model"))}),
    "Tokens": only(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _IDS}, {"token_strs": either(array(STRING), NULL)}
    ),
    "Embeddings": only(
        {
            "object": _const("list"),
            "data": array(
                only({"object": _const("embedding"), "index": _COUNT, "embedding": either(array(_NUMBER), STRING)}),
                minItems=1,
            ),
            "model": STRING,
            "usage": only({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "Detokenized": only({"prompt": STRING}),
    "Health": only({"status": _const("ok")}),
    "NotReady": only({"status": _const("not ready"), "missing": STRING}),
    "Version": only({"version": STRING}),
    **response_answers.COMPONENTS,
}

WHOLE: dict[str, str] = {
    "chat_completions": "ChatCompletion",
    "completions": "Completion",
    "responses": "Response",
    "embeddings": "Embeddings",
    "models": "Models",
    "model": "Model",
    "tokenize": "Tokens",
    "detokenize": "Detokenized",
    "live": "Health",
    "ready": "Health",
    "health": "Health",
    "version": "Version",
}
"""The JSON document that an operation answers."""

EVENTS: dict[str, str] = {
    "chat_completions": "ChatCompletionChunk",
    "completions": "CompletionChunk",
    "responses": "ResponseEvent",
}
"""The data of the events that it answers where a stream was asked for."""
