"""A model with sliding windows, served: the engine hears of its KV groups and gives blocks back behind the windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import worker_pb2
from services.common.errors import InvalidArgument
from services.engine.__main__ import Engine
from services.engine.wire.cards import to_windows
from tests.engine.cluster import Answer, Gateway, WorkerProcess, running_engine


def test_groups_are_told_by_their_windows() -> None:
    groups = [worker_pb2.KvGroup(layers=2), worker_pb2.KvGroup(layers=2, sliding_window=128)]
    assert to_windows(groups) == (None, 128)
    for wrong in ([], [worker_pb2.KvGroup(sliding_window=0)]):
        with pytest.raises(InvalidArgument) as caught:
            to_windows(wrong)
        assert caught.value.field == "kv_groups"


async def outputs(engine: Engine, listen: str, prompts: list[list[int]]) -> tuple[int, list[dict[int, list[int]]]]:
    """The effective context, and what each prompt gives when all run together."""
    gateway = Gateway(listen)
    hello = await gateway.wait_until_served()
    await gateway.attach()
    answers: list[Answer] = [
        await gateway.submit(handle, prompt, max_tokens=40) for handle, prompt in enumerate(prompts, 1)
    ]
    await gateway.finished(*gateway.answers)
    await gateway.close()
    assert engine.loop is not None
    return hello.limits.max_model_len, [answer.tokens for answer in answers]


async def test_windows_hold_more_context_in_the_same_pool_and_change_no_token(
    worker: str, sockets: Path, listen: str
) -> None:
    prompts = [[(7 * at + row) % 250 for at in range(60 + 40 * row)] for row in range(6)] * 2
    knobs = {"num_blocks": 40, "block_size": 16, "max_num_batched_tokens": 32}
    async with running_engine(worker, listen, **knobs) as engine:
        plain_len, right = await outputs(engine, listen, prompts)
    process = WorkerProcess(f"unix:{sockets}/windows.sock", "--simulated-kv-windows", "0,32")
    process.start()
    try:
        async with running_engine(process.address, listen, **knobs) as engine:
            length, tokens = await outputs(engine, listen, prompts)
    finally:
        process.stop()
    assert tokens == right
    assert plain_len == 40 * 16
    assert 40 * 16 // 2 < length < plain_len  # the group with a window needs five blocks at most
