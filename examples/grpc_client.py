"""A client of the gRPC API: a streamed chat, a tool, an answer by a JSON schema, vectors, and errors with their field.

.venv/bin/python examples/grpc_client.py chat Why is the sky blue?
.venv/bin/python examples/grpc_client.py tool What is the weather in Oslo?
.venv/bin/python examples/grpc_client.py schema Who wrote Faust?
.venv/bin/python examples/grpc_client.py embed one two
.venv/bin/python examples/grpc_client.py --address HOST:PORT ...
"""

import argparse
import json
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc

STREAM = gateway_pb2.RequestOptions(stream=True)
SHORT = gateway_pb2.SamplingOptions(max_tokens=200, temperature=0)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}


def message(role: str, text: str, **fields) -> gateway_pb2.ChatMessage:
    """A turn of a conversation."""
    return gateway_pb2.ChatMessage(role=role, content=[gateway_pb2.ContentPart(text=text)], **fields)


def ask(gateway, request: gateway_pb2.ChatRequest) -> gateway_pb2.ChatMessage:
    """Shows an answer as it comes, and gives it as a turn for the conversation."""
    text, thoughts, calls = "", "", []
    for delta in gateway.Chat(request):
        thoughts += delta.reasoning_content
        text += delta.content
        print(delta.content, end="", flush=True)
        for piece in delta.tool_calls:  # id and name on the first piece of a call, then more of its arguments
            if piece.index == len(calls):
                calls.append(gateway_pb2.ToolCall(index=piece.index, id=piece.id, name=piece.name))
            calls[piece.index].arguments += piece.arguments
    print()
    return message("assistant", text, tool_calls=calls, reasoning_content=thoughts or None)


def chat(gateway, words: str) -> None:
    """An answer as it comes."""
    ask(gateway, gateway_pb2.ChatRequest(messages=[message("user", words)], sampling=SHORT, options=STREAM))


def tool(gateway, words: str) -> None:
    """The model must ask for the weather, is told it, and answers."""
    turns = [message("user", words)]
    for choice in ("required", "auto"):
        answer = ask(
            gateway,
            gateway_pb2.ChatRequest(
                messages=turns, tools_json=json.dumps(TOOLS), tool_choice=choice, sampling=SHORT, options=STREAM
            ),
        )
        turns.append(answer)
        for call in answer.tool_calls:
            print(f"[{call.name}({call.arguments})]")
            result = json.dumps({**json.loads(call.arguments), "degrees": 12})
            turns.append(message("tool", result, tool_call_id=call.id))


def schema(gateway, words: str) -> None:
    """The answer is JSON by the schema, whatever the model would rather say."""
    constraint = common_pb2.Constraint(json_schema=json.dumps(PERSON))
    sampling = gateway_pb2.SamplingOptions(constraint=constraint, temperature=0)
    (answer,) = gateway.Chat(gateway_pb2.ChatRequest(messages=[message("user", words)], sampling=sampling))
    print(json.loads(answer.content))


def embed(gateway, words: str) -> None:
    """A vector of length 1 for each word."""
    inputs = [gateway_pb2.EmbedInput(text=word) for word in words.split()]
    for vector in gateway.Embed(gateway_pb2.EmbedRequest(inputs=inputs)).embeddings:
        print(len(vector.values), [round(value, 4) for value in vector.values[:4]])


def told(error: grpc.RpcError) -> str:
    """What the server said, and the field it blames."""
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    fields = (
        [v.field for detail in status.details if detail.Unpack(bad) for v in bad.field_violations] if status else []
    )
    return f"{error.code().name} {' '.join(fields)}: {error.details()}"


def main() -> int:
    """Runs one of the above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("what", choices=["chat", "tool", "schema", "embed"])
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    run = {"chat": chat, "tool": tool, "schema": schema, "embed": embed}[given.what]
    with grpc.insecure_channel(given.address) as channel:
        try:
            run(gateway_pb2_grpc.GatewayServiceStub(channel), " ".join(given.words))
        except grpc.RpcError as error:
            print(told(error), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
