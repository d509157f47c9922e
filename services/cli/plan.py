"""`triptych plan [MODEL]`: the memory that `triptych serve` would take with the same options, in bytes.

A worker is started, loads the model, runs the largest step, says what it counted, and is stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from protos import worker_pb2, worker_pb2_grpc
from services.cli import client, own_worker, serve
from services.common.channel import connect
from services.engine.config import EngineSettings
from services.local import demo
from services.local.cluster import Cluster, ClusterError

_PATIENCE_S = 600.0


def main(command: str, argv: Sequence[str]) -> int:
    """Prints the plan. Status 1 where the model cannot be loaded, or does not fit."""
    asked = serve.parse(argv, f"triptych {command}", __doc__ or "")
    asked.knobs["worker"] = {"log_level": "warning", "log_style": "text", **asked.knobs["worker"], "metrics_port": 0}
    engine = EngineSettings.resolve(asked.knobs["engine"])
    try:
        cluster = serve.cluster_of(asked)
        try:
            return client.run(_print_plan(cluster, cluster.start_worker(), engine))
        finally:
            cluster.stop(drain_s=0)
    except (ClusterError, demo.DemoModelError, TimeoutError) as error:
        print(f"triptych {command}: {error or 'the worker does not answer'}", file=sys.stderr)
        return 1


async def _print_plan(cluster: Cluster, address: str, engine: EngineSettings) -> None:
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        loaded = await own_worker.load(stub, "plan", lambda: not cluster.runs("worker"), _PATIENCE_S)
        hello = await stub.Hello(worker_pb2.WorkerServiceHelloRequest(engine=own_worker.peer("plan")))
        request = worker_pb2.PlanMemoryRequest(
            engine_incarnation=own_worker.INCARNATION,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len or loaded.model.max_model_len,
            block_size=engine.on(hello.device).block_size,
            kv_cache_bytes=engine.kv_cache_bytes,
            encoder_budget=engine.encoder_budget,
            encoder_cache_size=engine.encoder_cache_size,
        )
        plan: worker_pb2.PlanMemoryResponse = await stub.PlanMemory(request)
    print(table(loaded, plan, request))


def table(
    loaded: worker_pb2.LoadResponse, plan: worker_pb2.PlanMemoryResponse, request: worker_pb2.PlanMemoryRequest
) -> str:
    """One line for each kind of memory, and their sum."""
    rows = list(_rows(loaded, plan, request))
    total = plan.weight_bytes + plan.process_bytes + plan.step_bytes + plan.kv_cache_bytes
    rows.append(("total", total, "bytes"))
    width = max(len(f"{size:,}") for _, size, _ in rows)
    return "\n".join(f"{what:<18} {size:>{width},}  {note}".rstrip() for what, size, note in rows)


def _rows(
    loaded: worker_pb2.LoadResponse, plan: worker_pb2.PlanMemoryResponse, request: worker_pb2.PlanMemoryRequest
) -> Iterator[tuple[str, int, str]]:
    for weights in sorted(loaded.weights, key=lambda weights: -weights.bytes):
        yield f"weights, {weights.type}", weights.bytes, ""
    if not loaded.weights:
        yield "weights", plan.weight_bytes, ""
    yield "process", plan.process_bytes, "Python and its libraries, as measured"
    yield (
        "largest step",
        plan.step_bytes,
        f"{request.max_num_batched_tokens:,} tokens, {request.max_num_seqs:,} rows, as measured",
    )
    tokens = plan.num_blocks * request.block_size
    yield (
        "KV cache",
        plan.kv_cache_bytes,
        f"{plan.num_blocks:,} blocks of {request.block_size} tokens, {plan.bytes_per_block:,} each: {tokens:,} tokens",
    )
