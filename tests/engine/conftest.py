"""One simulated worker process for all tests that leave it alive, and a socket folder with a short path."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.cluster import WorkerProcess


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
