"""Vectors over gRPC: an engine in this process, a worker process, and what a gateway is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from services.engine.__main__ import Engine
from tests.engine.cluster import Gateway, WorkerProcess, all_blocks_free, attached, running_engine

POOLINGS: tuple[Any, ...] = (common_pb2.POOLING_MEAN, common_pb2.POOLING_LAST)


def counted(engine: Engine, name: str, **labels: str) -> float:
    assert engine.loop is not None
    named = {"model_name": engine.loop.standing.model.name, "engine": engine.settings.name, **labels}
    return engine.registry.get_sample_value(name, named) or 0.0


async def test_a_vector_is_told_once_and_counted_as_a_request_that_stopped(engine: Engine, gateway: Gateway) -> None:
    prompt = list(b"a prompt to be pooled")
    answers = [
        await gateway.submit(handle, prompt, pooling=POOLINGS[handle % 2], sampling={"max_tokens": 0})
        for handle in range(1, 5)
    ]
    spoken = await gateway.submit(9, prompt)
    await gateway.finished(*range(1, 5), 9)
    vector = answers[0].vector
    assert vector is not None
    assert sum(value * value for value in vector) == pytest.approx(1)
    for answer in answers:
        assert answer.vector == vector, "the simulated worker looks at the prompt alone"
        assert answer.tokens == answer.finish == {}
        assert answer.started is not None
    assert len(spoken.tokens[0]) == 8
    assert counted(engine, "triptych:engine_finished_choices_total", finished_reason="stop") == 4
    assert counted(engine, "vllm:generation_tokens_total") == 8
    assert counted(engine, "vllm:prompt_tokens_total") == 5 * len(prompt)
    await all_blocks_free(gateway)


async def test_a_vector_leaves_nothing_to_a_gateway_that_comes_back(engine: Engine, gateway: Gateway) -> None:
    await gateway.generate([1, 2, 3], pooling=POOLINGS[0])
    await gateway.detach()
    await gateway.attach()
    assert gateway.live_handles == []


async def test_a_worker_that_is_killed_half_way_changes_no_vector(sockets: Path) -> None:
    """Steps of 16 tokens that take 20 ms each; the prompt needs 25 of them."""
    options = ("--simulated-step-us", "20000", "--simulated-token-us", "0", "--simulated-row-us", "0")
    worker = WorkerProcess(f"unix:{sockets}/dies.sock", *options)
    worker.start()
    listen = f"unix:{sockets}/dies-engine.sock"
    prompt = [at % 250 for at in range(400)]
    try:
        async with running_engine(worker.address, listen, max_num_batched_tokens=16) as engine:
            gateway = await attached(listen)
            undisturbed = await gateway.generate(prompt, 1, pooling=POOLINGS[0])
            disturbed = await gateway.submit(2, prompt, pooling=POOLINGS[0])
            await gateway.until(lambda: disturbed.started)
            assert engine.loop is not None
            worker.kill()
            worker.start()
            await gateway.finished(2)
            assert disturbed.vector == undisturbed.vector is not None
            assert counted(engine, "triptych:engine_finished_choices_total", finished_reason="stop") == 2
            await gateway.close()
    finally:
        worker.stop()
