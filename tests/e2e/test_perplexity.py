"""Perplexity of the demo model on a fixed text, through the whole stack, where no compiler is found.

The oracle shares a reader with us, so a fault of both would hide from a comparison of tokens; a
model that reads its weights wrongly does not find plain English this likely.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from services.local.cluster import Cluster
from tests.e2e import oracle
from tests.e2e.client import connected, generate

TOKENS = 512
PERPLEXITY = 13.50


async def test_perplexity_of_a_fixed_text_without_native_kernels(demo_gguf: Path, tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "TRIPTYCH_CACHE": str(tmp_path)}  # neither a compiler nor what it built before
    ids = oracle.load_tokenizer(demo_gguf).encode(oracle.english_text()).ids[1000 : 1000 + TOKENS]
    with (
        (tmp_path / "log").open("ab") as log,
        Cluster(model=demo_gguf, worker=oracle.EXACT, environ=environ, log=log) as cluster,
    ):
        async with connected(cluster.grpc_address) as stub:
            answer = await generate(stub, ids, max_tokens=1, temperature=0, prompt_logprobs=0)
    assert "there is no C++ compiler" in (tmp_path / "log").read_text()
    assert len(answer.prompt_logprobs) == TOKENS
    assert [position.token.token_id for position in answer.prompt_logprobs[1:]] == ids[1:]
    mean = sum(position.token.logprob for position in answer.prompt_logprobs[1:]) / (TOKENS - 1)
    assert math.exp(-mean) == pytest.approx(PERPLEXITY, rel=0.005)
