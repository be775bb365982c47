"""The suite that every client library runs: a bad network."""

from __future__ import annotations

import hashlib

import pytest
from suite import TICK, cuts, sample, ticks
from testbed import SIZES, Proxy, Testbed

from baton_sandbox import ExecLostError, Sandbox

#: Writes this many bytes without repetition, then their digest to stderr.
FLOOD = """
import hashlib, sys
left, number, digest = {size}, 0, hashlib.sha256()
while left:
    part = b"".join(hashlib.sha256(b"%d" % (number + i)).digest() * 64 for i in range(32))[:left]
    number, left = number + 32, left - len(part)
    digest.update(part)
    sys.stdout.buffer.write(part)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
"""


async def test_output_is_exact_over_many_cuts(proxy: Proxy, sandbox: Sandbox) -> None:
    size, count = SIZES["output"], SIZES["cuts"]
    await proxy.network(cuts=cuts(size, count), cut=True)
    result = await sandbox.run_code(FLOOD.format(size=size))
    assert len(result.stdout_bytes) == size
    assert hashlib.sha256(result.stdout_bytes).hexdigest() == result.stderr
    assert (await proxy.network())["cut"] >= count - 2, "it was hardly cut"


async def test_input_is_exact_over_many_cuts(proxy: Proxy, sandbox: Sandbox) -> None:
    size, count = SIZES["input"], SIZES["input_cuts"]
    data = sample(size)
    running = await sandbox.exec(["sha256sum"], stdin=True)
    for i in range(count + 1):
        await running.write_stdin(data[i * len(data) // (count + 1) : (i + 1) * len(data) // (count + 1)])
        await proxy.network(cut=True)
    await running.close_stdin()
    assert (await running.wait()).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    # The same, as an option.
    result = await sandbox.run(["sha256sum"], stdin=data)
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_input_after_an_attach_is_exact(proxy: Proxy) -> None:
    sandbox = await Sandbox.create(proxy.url)
    running = await sandbox.exec(["cat"], stdin=True, exec_id="cat")
    await running.write_stdin("AB")
    async for data in running.stdout:
        assert data == b"AB"
        break
    ref = await sandbox.detach()
    sandbox = await ref.attach()
    running = await sandbox.follow("cat")
    await running.write_stdin("a longer line\n")
    await running.close_stdin()
    assert (await running.wait()).stdout == "ABa longer line\n"
    # The first client leaves while its input is unacknowledged: the second one continues after what was accepted.
    data = sample(SIZES["input"])
    command = "while [ ! -e /tmp/go ]; do sleep 0.02; done; exec sha256sum"
    running = await sandbox.exec(command, stdin=True, exec_id="sum")
    await running.write_stdin(data[:700_000])
    await proxy.network(cut=True)
    sandbox = await (await sandbox.detach()).attach()
    (accepted,) = (view.stdin for view in sandbox.info().execs if view.exec_id == "sum")
    assert accepted <= 700_000
    running = await sandbox.follow("sum")
    await sandbox.run("touch /tmp/go")
    step = (len(data) - accepted) // 4 + 1
    for start in range(accepted, len(data), step):
        await running.write_stdin(data[start : start + step])
        await proxy.network(cut=True)
    await running.close_stdin()
    assert (await running.wait()).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    await sandbox.kill()


async def test_input_after_that_of_another_client_is_exact(testbed: Testbed, proxy: Proxy, sandbox: Sandbox) -> None:
    async def other_writes(line: str, offset: int) -> None:
        await proxy.network(stall=True)
        other = await Sandbox.attach((await testbed.proxy()).url, sandbox.id, sandbox.token)
        followed = await other.follow("cat", stdout=offset)
        await followed.write_stdin(f"{line}\n")
        async for found in followed.stdout.lines():
            assert found == line
            break
        await other.close()

    running = await sandbox.exec(["cat"], stdin=True, exec_id="cat")
    await running.write_stdin("one\n")
    lines = running.stdout.lines()
    assert await lines.__anext__() == "one"
    # By now the input is acknowledged, too.
    await sandbox.run("true")
    await other_writes("two", 4)
    await proxy.network(stall=False, cut=True)
    assert await lines.__anext__() == "two"
    await running.write_stdin("three\n")
    assert await lines.__anext__() == "three"
    await sandbox.run("true")
    # Written into a connection that is dead: as long as what the other one wrote, and not taken for it.
    await other_writes("four", 14)
    await running.write_stdin("lost\n")
    await proxy.network(stall=False, cut=True)
    with pytest.raises(ExecLostError, match="another client wrote input"):
        await running.wait()
    running = await sandbox.follow("cat", stdout=19)
    await running.write_stdin("five\n")
    await running.close_stdin()
    result = await running.wait()
    assert (result.stdout, result.exit_code) == ("five\n", 0)


async def test_a_slow_network_changes_nothing(proxy: Proxy, sandbox: Sandbox) -> None:
    await proxy.network(delay=0.05)
    assert (await sandbox.run(TICK.format(count=10))).stdout == ticks(10)
    assert (await sandbox.run(["cat"], stdin="slow")).stdout == "slow"


async def test_a_stalled_connection_is_given_up_and_taken_up_again(proxy: Proxy) -> None:
    async with await Sandbox.create(proxy.url, silence=3.0) as sandbox:
        running = await sandbox.exec(TICK.format(count=40))
        async for _ in running.stdout:
            break
        await proxy.network(stall=True)
        result = await running.wait()
        assert result.stdout.endswith(ticks(40)[-100:]) and result.exit_code == 7
        assert (await proxy.network())["connections"] >= 2
