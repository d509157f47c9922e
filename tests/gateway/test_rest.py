"""The OpenAI API as the official client sees it: whole stack but for the model."""

from __future__ import annotations

from tests.gateway.stack import gateway_stack

CHAT = [{"role": "user", "content": "hi"}]


async def test_chat_whole_and_streamed_say_the_same() -> None:
    async with gateway_stack() as s:
        whole = await s.openai.chat.completions.create(model="bytes", messages=CHAT)
        assert whole.choices[0].message.content == "hello world"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        prompt = "user: hi\nassistant: "
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 12)
        stream = await s.openai.chat.completions.create(model="bytes", messages=CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices[0].delta.content is None
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert all(chunk.usage is None for chunk in chunks)  # C86
        sent = bytes(s.engine.submits[0].prompt_id_i32le[::4])
        assert sent == prompt.encode()
        assert s.engine.aborts == []
