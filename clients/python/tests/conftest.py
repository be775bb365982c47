from __future__ import annotations

from typing import AsyncIterator, Iterator

import pytest
from testbed import Proxy, Testbed

from baton_sandbox import Sandbox


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Server `a` is shared by all tests; tests that stop a server start their own."""
    testbed = Testbed()
    try:
        testbed.do_now("server", name="a")
        yield testbed
    finally:
        testbed.end()


@pytest.fixture
async def proxy(testbed: Testbed) -> Proxy:
    return await testbed.proxy()


@pytest.fixture
async def sandbox(proxy: Proxy) -> AsyncIterator[Sandbox]:
    async with await Sandbox.create(proxy.url) as sandbox:
        yield sandbox
