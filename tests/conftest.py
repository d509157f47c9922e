"""What every test may use. A bare checkout runs: the stubs are built before anything imports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import build

if build.is_stale():
    build.build()

from services.local import demo


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, downloaded into the cache folder the first time."""
    return demo.fetch()
