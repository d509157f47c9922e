"""Streams a chat with the official OpenAI client: `.venv/bin/python examples/openai_chat.py "Why is the sky blue?"`."""

import sys

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], max_tokens=100, stream=True
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
