"""A command keeps running while no client is connected, and the next client gets all its output.

Short drops need none of this, because the client reconnects by itself. This is for a program that exits and
attaches again later, with the id and the token of the sandbox.
"""

import asyncio

from baton_sandbox import Sandbox, Update


def show(update: Update) -> None:
    print("  status", update.status.value)


async def main() -> None:
    sandbox = await Sandbox.create(on_status=show)
    running = await sandbox.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", exec_id="count")
    ref = await sandbox.detach()
    print("no client is connected")

    sandbox = await Sandbox.attach(None, ref.id, ref.token, on_status=show)
    result = await (await sandbox.follow(running.id)).wait()
    assert result.stdout.split() == [str(i) for i in range(1, 21)]
    print("all 20 lines arrived, exit code", result.exit_code)
    await sandbox.kill()


asyncio.run(main())
