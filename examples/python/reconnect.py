"""A command goes on while nobody is connected, and its output is all there afterwards.

Short drops need nothing of this: the client mends its connection by itself. This is for a program
that ends and comes back later, with the sandbox's id and token in its pocket.
"""

import asyncio

from baton_sandbox import Sandbox, Update


def show(update: Update) -> None:
    print("  status", update.status.value)


async def main() -> None:
    sandbox = await Sandbox.create(on_status=show)
    running = await sandbox.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", exec_id="count")
    place, name = (sandbox.id, sandbox.token), running.id
    await sandbox.close()
    print("nobody is connected")

    sandbox = await Sandbox.attach(None, *place, on_status=show)
    result = await (await sandbox.follow(name)).wait()
    assert result.stdout.split() == [str(i) for i in range(1, 21)]
    print("all 20 lines are here, exit code", result.exit_code)
    await sandbox.kill()


asyncio.run(main())
