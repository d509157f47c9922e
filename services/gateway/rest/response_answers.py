"""JSON schemas of what /v1/responses answers: the response, its items, and its events."""

from __future__ import annotations

from services.gateway.rest.schemas import BOOLEAN, NULL, OBJECT, STRING, Schema, array, either, nullable, only, ref

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TOKEN: dict[str, Schema] = {"token": STRING, "logprob": _NUMBER, "bytes": array(_COUNT)}
_ENDED: Schema = {"enum": ["completed", "incomplete"]}


def _const(value: str) -> Schema:
    return {"const": value}


COMPONENTS: dict[str, Schema] = {
    "ResponseReasoning": only(
        {
            "id": STRING,
            "type": _const("reasoning"),
            "summary": array(OBJECT, maxItems=0),
            "content": array(only({"type": _const("reasoning_text"), "text": STRING})),
            "status": _ENDED,
        }
    ),
    "ResponseMessage": only(
        {
            "id": STRING,
            "type": _const("message"),
            "role": _const("assistant"),
            "content": array(
                only(
                    {
                        "type": _const("output_text"),
                        "text": STRING,
                        "annotations": array(OBJECT, maxItems=0),
                        "logprobs": array(only({**_TOKEN, "top_logprobs": array(only(_TOKEN))})),
                    }
                )
            ),
            "status": _ENDED,
        }
    ),
    "ResponseFunctionCall": only(
        {
            "id": STRING,
            "type": _const("function_call"),
            "call_id": STRING,
            "name": STRING,
            "arguments": STRING,
            "status": _ENDED,
        }
    ),
    "ResponseUsage": only(
        {
            "input_tokens": _COUNT,
            "input_tokens_details": only({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
            "output_tokens": _COUNT,
            "output_tokens_details": only({"reasoning_tokens": _COUNT}),
            "total_tokens": _COUNT,
        }
    ),
    "Response": only(
        {
            "id": STRING,
            "object": _const("response"),
            "created_at": _COUNT,
            "completed_at": nullable(_COUNT),
            "model": STRING,
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "error": nullable(only({"code": {"enum": ["server_error", "rate_limit_exceeded"]}, "message": STRING})),
            "incomplete_details": nullable(only({"reason": _const("max_output_tokens")})),
            "output": array(either(*map(ref, ("ResponseReasoning", "ResponseMessage", "ResponseFunctionCall")))),
            "usage": nullable(ref("ResponseUsage")),
            "instructions": nullable(STRING),
            "metadata": {"type": "object", "additionalProperties": STRING},
            "max_output_tokens": nullable(_COUNT),
            "max_tool_calls": NULL,
            "parallel_tool_calls": BOOLEAN,
            "previous_response_id": NULL,
            "prompt_cache_key": nullable(STRING),
            "reasoning": OBJECT,
            "safety_identifier": nullable(STRING),
            "service_tier": _const("default"),
            "store": {"const": False},
            "background": {"const": False},
            "temperature": _NUMBER,
            "text": OBJECT,
            "tool_choice": ref("ToolChoice"),
            "tools": array(ref("ResponseTool")),
            "top_logprobs": _COUNT,
            "top_p": _NUMBER,
            "truncation": _const("disabled"),
            "user": nullable(STRING),
        }
    ),
    "ResponseEvent": {
        "type": "object",
        "properties": {"type": STRING, "sequence_number": _COUNT},
        "required": ["type", "sequence_number"],
    },
}
