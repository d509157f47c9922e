"""One simulated worker process for all tests that leave it alive, and an engine with a gateway for each test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.engine.__main__ import Engine
from tests.engine.cluster import Gateway, WorkerProcess, attached, running_engine


@pytest.fixture(scope="session")
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tri", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def worker(sockets: Path) -> Iterator[str]:
    """The address of a worker that takes 1 ms a step."""
    process = WorkerProcess(
        f"unix:{sockets}/worker.sock",
        *("--simulated-step-us", "1000", "--simulated-token-us", "0", "--simulated-row-us", "0"),
    )
    process.start()
    yield process.address
    process.stop()


@pytest.fixture
def listen(sockets: Path) -> str:
    return f"unix:{sockets}/engine.sock"


@pytest.fixture
async def engine(worker: str, listen: str) -> AsyncIterator[Engine]:
    async with running_engine(worker, listen, num_blocks=600, max_waiting_requests=70) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: Engine, listen: str) -> AsyncIterator[Gateway]:
    gateway = await attached(listen)
    yield gateway
    await gateway.close()
