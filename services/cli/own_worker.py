"""A worker that a command starts for itself: waiting until it has loaded its model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import backoff
from services.common.settings import SettingsError

INCARNATION = 1
"""A worker loads for an engine, so this is what we are to our own one."""


def peer(name: str) -> common_pb2.Peer:
    """A command, as it names itself to its worker."""
    return common_pb2.Peer(role="cli", name=name, incarnation=INCARNATION, contract_min=1, contract_max=1)


async def load(
    stub: worker_pb2_grpc.WorkerServiceAsyncStub, name: str, ended: Callable[[], bool], patience_s: float
) -> worker_pb2.LoadResponse:
    """What it loaded. Raises SettingsError where it ends meanwhile, TimeoutError where it takes too long."""
    async with asyncio.timeout(patience_s):
        async for _ in backoff():
            if ended():
                raise SettingsError("the worker cannot load the model; its log stands above")
            try:
                answer: worker_pb2.LoadResponse = await stub.Load(worker_pb2.LoadRequest(engine=peer(name)))
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                return answer
    raise TimeoutError
