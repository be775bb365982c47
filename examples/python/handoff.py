"""Move a sandbox to another instance while a command runs in it, without losing a byte."""

import asyncio

from baton_sandbox import Sandbox


async def main() -> None:
    sandbox = await Sandbox.create(persistent=True)
    running = await sandbox.exec("for i in $(seq 1 40); do echo $i; sleep 0.05; done")
    before = sandbox.info().instance
    counting = asyncio.ensure_future(running.wait(check=True))

    # The load balancer decides which instance is next; with a single server it is the same one.
    await sandbox.handoff()
    print("it was on", before, "and is on", sandbox.info().instance)

    lines = (await counting).stdout.split()
    assert lines == [str(i) for i in range(1, 41)]
    print(len(lines), "lines, none missing, none repeated")
    await sandbox.kill()


asyncio.run(main())
