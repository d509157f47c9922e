"""What every test may use. A bare checkout runs: the stubs are built before anything imports them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protos import build

if build.is_stale():
    build.build()

from services.local import demo

# torch is not imported yet. Two threads of its own take as long as one where the cores are shared, and twice the CPU.
# What a test or a role sets itself counts all the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of child processes import the same modules: they keep them compiled, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, downloaded into the cache folder the first time."""
    return demo.fetch()
