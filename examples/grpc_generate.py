"""Streams a completion over gRPC, text and token ids: `.venv/bin/python examples/grpc_generate.py "The sky is"`."""

import sys

import grpc

from protos import gateway_pb2, gateway_pb2_grpc

prompt = " ".join(sys.argv[1:]) or "The sky is"
with grpc.insecure_channel("127.0.0.1:50051") as channel:
    gateway = gateway_pb2_grpc.GatewayServiceStub(channel)
    request = gateway_pb2.GenerateRequest(
        text=prompt,
        sampling=gateway_pb2.SamplingOptions(max_tokens=20, temperature=0),
        options=gateway_pb2.RequestOptions(stream=True, return_token_ids=True),
    )
    for message in gateway.Generate(request):
        print(repr(message.text), list(message.token_ids))
