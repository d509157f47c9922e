"""How much room a request has: the effective context, the default of max_tokens, bodies of some size."""

from __future__ import annotations

import json

import pytest

from tests.gateway.client_checks import obedient, say
from tests.gateway.fake_engine import CONTEXT, FakeEngine
from tests.gateway.stack import gateway_stack


async def test_a_prompt_is_held_to_the_effective_context_before_it_is_queued() -> None:
    """The model was made for twice as much; the engine's own limit counts."""
    async with gateway_stack() as s:
        fits = {"prompt": [97] * (CONTEXT - 1), "max_tokens": 5}
        assert (await s.http.post("/v1/completions", json=fits)).json()["usage"]["completion_tokens"] == 1
        for prompt in ([97] * CONTEXT, "a" * (CONTEXT + 1)):
            refused = await s.http.post("/v1/completions", json={"prompt": prompt})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert len(s.engine.submits) == 1


@pytest.mark.parametrize("field", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
async def test_without_max_tokens_a_chat_may_fill_the_context(field: dict[str, None]) -> None:
    async with gateway_stack(FakeEngine(script=lambda submit, choice: [97] * 2 * CONTEXT)) as s:
        body = {"messages": [{"role": "user", "content": "x"}], **field}
        answer = (await s.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == CONTEXT


async def test_a_body_of_50_kilobytes_is_answered() -> None:
    engine = obedient()
    engine.context = 1 << 17
    async with gateway_stack(engine) as s:
        body = {"messages": [{"role": "system", "content": "é" * 25_000}, *say("all of it was read")]}
        assert len(json.dumps(body, ensure_ascii=False).encode()) > 50_000
        answer = await s.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "all of it was read"
        assert answer.json()["usage"]["prompt_tokens"] > 50_000
