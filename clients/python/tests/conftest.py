from __future__ import annotations

from typing import AsyncIterator, Iterator

import pytest
from stage import Proxy, Stage

from baton_sandbox import Sandbox


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Server `a`, for everybody; whoever ends servers starts their own."""
    stage = Stage()
    try:
        stage.do_now("server", name="a")
        yield stage
    finally:
        stage.end()


@pytest.fixture
async def proxy(stage: Stage) -> Proxy:
    return await stage.proxy()


@pytest.fixture
async def sandbox(proxy: Proxy) -> AsyncIterator[Sandbox]:
    async with await Sandbox.create(proxy.url) as sandbox:
        yield sandbox
