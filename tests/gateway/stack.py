"""A whole gateway in the test's own process, in front of a scripted engine over real gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import httpx
import openai

from protos import gateway_pb2_grpc
from services.gateway.__main__ import Gateway
from services.gateway.config import GatewaySettings
from services.gateway.rest.http import bind
from tests.gateway.fake_engine import FakeEngine, until


@dataclass
class Stack:
    engine: FakeEngine
    gateway: Gateway
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    channel: grpc.aio.Channel

    @property
    def stub(self) -> gateway_pb2_grpc.GatewayServiceStub:
        return gateway_pb2_grpc.GatewayServiceStub(self.channel)


@contextlib.asynccontextmanager
async def clients(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, openai.AsyncOpenAI]]:
    """A plain client and the official one. Reading the world's certificates takes 50 ms, and there is no TLS here."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as client,
    ):
        yield http, client


@contextlib.asynccontextmanager
async def gateway_stack(engine: FakeEngine | None = None, **knobs: object) -> AsyncIterator[Stack]:
    """Ready to serve. The fake's model is called "bytes"."""
    engine = engine or FakeEngine()
    await engine.start()
    settings = GatewaySettings.build(engine=engine.address, http_port=0, grpc_port=0, **knobs)
    gateway = Gateway(settings, bind("127.0.0.1", 0), "0.0-test")
    await gateway.start()
    try:
        async with (
            clients(f"http://127.0.0.1:{gateway.http.port}") as (http, client),
            grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        ):
            await until(lambda: gateway.front.obstacle() is None)
            yield Stack(engine, gateway, http, client, channel)
    finally:
        await gateway.close()
        await engine.kill()
