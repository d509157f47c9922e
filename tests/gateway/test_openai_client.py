"""The checks of the official client against a gateway in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.client_checks import CHECKS, Check, obedient
from tests.gateway.stack import Stack, gateway_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with gateway_stack(obedient()) as stack:
        yield stack


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_official_client(stack: Stack, check: Check) -> None:
    await check(stack.openai)
    assert not stack.engine.live
