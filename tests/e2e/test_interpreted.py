"""The whole stack over steps on a device, whose kernels Triton's interpreter runs: the answers of the reference."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.local.cluster import Cluster
from tests.e2e.client import Answer, connected, generate, generate_all
from tests.worker.tiny_llama import PROMPT, tiny_llama

PROMPTS = (PROMPT, PROMPT[4:], [7], [*PROMPT, *range(60, 80)])
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.7},
)
ENGINE = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 64, "block_size": 4}


async def answers(model: Path, ops: str) -> list[Answer]:
    """To every prompt with every sampling, those of one sampling at once; steps are cut at 16 tokens and three rows."""
    with Cluster(model=model, engine=ENGINE, worker={"ops": ops, "deterministic": True, "threads": 1}) as cluster:
        async with connected(cluster.grpc_address) as stub:
            found = [await generate(stub, PROMPT, max_tokens=2, temperature=0)]
            for sampling in SAMPLINGS:
                found += await generate_all(stub, PROMPTS, max_tokens=6, ignore_eos=True, **sampling)
            return found


@pytest.mark.slow
async def test_the_tokens_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "tiny")
    expected = await answers(model, "reference")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the processes inherit it
    found = await answers(model, "triton")
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert [len(answer.token_ids) for answer in found] == [2] + [6] * 8
    assert len({tuple(answer.token_ids) for answer in found}) > 6


@pytest.mark.slow
async def test_a_worker_that_is_killed_under_streams_costs_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are put on another's device as they stand."""

    async def streams(ops: str, *, kill: bool) -> list[list[int]]:
        with Cluster(model=model, engine=ENGINE, worker={"ops": ops, "deterministic": True, "threads": 1}) as cluster:
            async with connected(cluster.grpc_address) as stub:
                await generate(stub, PROMPT, max_tokens=2, temperature=0)
                asking = asyncio.create_task(
                    generate_all(stub, PROMPTS, max_tokens=10, ignore_eos=True, **SAMPLINGS[1])
                )
                if kill:
                    await asyncio.sleep(1)
                    assert not asking.done()
                    cluster.kill("worker")
                    cluster.start_role("worker")
                return [list(answer.token_ids) for answer in await asking]

    model = tiny_llama(tmp_path / "tiny")
    expected = await streams("reference", kill=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert await streams("triton", kill=True) == expected
