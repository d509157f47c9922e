"""A worker service on a unix socket with a simulated runner, and an engine's side of its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import connect
from services.common.server import Server
from services.worker import wire
from services.worker.blobs import Blobs
from services.worker.metrics import WorkerMetrics
from services.worker.service import WorkerService
from services.worker.simulated import Cost, SimulatedRunner
from services.worker.step import Runner
from tests.worker.columns import SHAPE


def peer(incarnation: int) -> Any:
    return common_pb2.Peer(role="engine", name="engine", incarnation=incarnation, contract_min=1, contract_max=1)


class Worker:
    """A running service, and the stub to call it."""

    def __init__(self, service: WorkerService, registry: CollectorRegistry, stub: Any) -> None:
        self.service = service
        self.registry = registry
        self.stub = stub

    async def prepare(self, incarnation: int = 5) -> None:
        """What an engine does before it opens the stream."""
        await self.stub.Load(worker_pb2.LoadRequest(engine=peer(incarnation)))
        await self.stub.InitCache(self.shape(incarnation))

    def shape(self, incarnation: int) -> Any:
        return worker_pb2.InitCacheRequest(
            engine_incarnation=incarnation,
            num_blocks=SHAPE.num_blocks,
            block_size=SHAPE.block_size,
            max_num_seqs=SHAPE.max_num_seqs,
            max_model_len=SHAPE.max_model_len,
            max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        )

    async def open(self, incarnation: int = 5, lease_ms: int = 60_000) -> Stream:
        """The stream, after its first answer."""
        stream = Stream(self.stub.Execute())
        await stream.send(open=worker_pb2.ExecuteOpen(engine=peer(incarnation), lease_ms=lease_ms))
        assert (await stream.call.read()).WhichOneof("frame") == "opened"
        return stream

    def metric(self, name: str, **labels: str) -> float:
        labels = {"model_name": "simulated", "worker": "test", **labels}
        return self.registry.get_sample_value(name, labels) or 0.0


class Stream:
    """The engine's side of Execute."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **kind: Any) -> None:
        await self.call.write(worker_pb2.ExecuteRequest(**kind))

    async def result(self) -> Any:
        answer = await self.call.read()
        return answer.result

    async def run(self, step: Any) -> Any:
        await self.send(step=step)
        return await self.result()


@asynccontextmanager
async def serving(
    runner: Runner, folder: Path, retry_s: float = 1.0, blobs: Blobs | None = None
) -> AsyncIterator[Worker]:
    """A service with this runner; a failed load is tried again after `retry_s` at first."""
    registry = CollectorRegistry()
    service = WorkerService(
        runner,
        WorkerMetrics(registry, "test"),
        name="test",
        version="0",
        model_path="",
        memory_bytes=0,
        retry_s=retry_s,
        blobs=blobs or Blobs(folder, wire.decode_blob, wire.fetch_blob),
    )
    address = f"unix:{folder}/w.sock"
    server = Server([address])
    await service.start(server)
    try:
        async with connect(address) as channel:
            yield Worker(service, registry, worker_pb2_grpc.WorkerServiceStub(channel))
    finally:
        await service.close()
        await server.stop(0)


def simulated(script: Path | None = None) -> SimulatedRunner:
    """A simulated runner that takes no time."""
    return SimulatedRunner(str(script) if script else "", Cost(), SHAPE.max_model_len)


def texts(results: Sequence[Any]) -> bytes:
    """The bytes that the toy tokenizer's ids stand for."""
    return b"".join(result.token_id_i32le[::4] for result in results)
