"""The response around its items: one document without streaming, otherwise the events from created to completed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from services.common.errors import ResourceExhausted, TriptychError
from services.gateway.asked import Asked
from services.gateway.request import Delta, Finish, FinishReason, SamplingParams, Usage
from services.gateway.rest.documents import Shown
from services.gateway.rest.responses.output import Events, Json, Output
from services.gateway.rest.shapes import ChatLogprobs

_FAILED: Final = (FinishReason.ABORT, FinishReason.ERROR)


@dataclass(slots=True, frozen=True)
class About:
    """What a response says of its request. `sampling` is what was done, `asked` what was asked for."""

    name: str  # its id without the prefix
    model: str
    created_s: int
    asked: Asked
    sampling: SamplingParams

    def json(self) -> Json:
        """The fields that are the same from the first event to the last."""
        asked = self.asked
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created_s,
            "model": self.model,
            "instructions": asked.instructions,
            "metadata": asked.metadata or {},
            "max_output_tokens": asked.max_tokens,
            "max_tool_calls": None,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **_object(asked.reasoning)},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "background": False,
            "temperature": self.sampling.temperature,
            "text": {"format": {"type": "text"}, **_object(asked.text)},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": [_tool(tool) for tool in _list(asked.tools)],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }


def _object(value: object) -> Json:
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[Json]:
    return value if isinstance(value, list) else []


def _tool(tool: Json) -> Json:
    return {"description": None, "parameters": None, "strict": False, **tool}


class Answer:
    """One response, of the one choice that there is."""

    def __init__(self, about: About, shown: Shown) -> None:
        self._about = about.json()
        self._counts = shown.counts
        self._events = Events()
        logprobs = ChatLogprobs.for_options(shown.options, shown.vocabulary, shown.skip_special)
        self._output = Output(about.name, self._events, logprobs)
        self._finish: Finish | None = None

    def first(self) -> bytes:
        """It exists, it runs."""
        running = self._document("in_progress")
        created = self._events("response.created", {"response": running})
        return created + self._events("response.in_progress", {"response": running})

    def chunk(self, number: int, delta: Delta) -> bytes:
        """The events of a delta."""
        del number
        self._finish = delta.finish
        return self._output.push(delta)

    def last(self) -> bytes:
        """How it ended."""
        document = self._ended()
        return self._events(f"response.{document['status']}", {"response": document})

    def failed(self, error: TriptychError) -> bytes:
        """What was being written ends where it stands, and the response has failed."""
        told = self._output.close()
        return told + self._events("response.failed", {"response": self._failure(error)})

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer without streaming."""
        for delta in deltas:
            self.chunk(0, delta)
        return orjson.dumps(self._ended())

    def _ended(self) -> Json:
        reason = FinishReason.ERROR if self._finish is None else self._finish.reason
        if reason in _FAILED:
            return self._failure(TriptychError("the engine ended the response before it was complete"))
        if reason is FinishReason.LENGTH:
            return self._document("incomplete", incomplete_details={"reason": "max_output_tokens"})
        return self._document("completed", completed_at=int(time.time()))

    def _failure(self, error: TriptychError) -> Json:
        code = "rate_limit_exceeded" if isinstance(error, ResourceExhausted) else "server_error"
        return self._document("failed", error={"code": code, "message": error.message})

    def _document(self, status: str, **fields: object) -> Json:
        running = status == "in_progress"
        return {
            **self._about,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "output": list(self._output.done),
            "usage": None if running else _usage(self._counts()),
            **fields,
        }


def _usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
