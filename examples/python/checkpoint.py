"""Store a sandbox with its memory, files and running commands, and restore it later on any instance."""

import asyncio

from baton_sandbox import Sandbox


async def main() -> None:
    sandbox = await Sandbox.create(persistent=True)
    await sandbox.run("echo remembered > /srv/note")
    await sandbox.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", exec_id="count")
    ref = sandbox.ref
    print("stored as", await sandbox.checkpoint(live=True))

    # The sandbox does not run now. Hours later, on any instance:
    sandbox = await ref.attach()
    result = await (await sandbox.follow("count")).wait(check=True)
    print("the command continued and wrote", len(result.stdout.split()), "lines")
    print("the file contains", await sandbox.read_text("/srv/note"), end="")
    await sandbox.kill()


asyncio.run(main())
