"""Store a sandbox with its memory, files and running commands; bring it back, wherever that is."""

import asyncio

from baton_sandbox import Sandbox


async def main() -> None:
    sandbox = await Sandbox.create(enable_checkpoint=True)
    await sandbox.run("echo remembered > /srv/note")
    await sandbox.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", exec_id="count")
    place = sandbox.place
    print("stored as", await sandbox.checkpoint(live=True))

    # Nothing of it runs now. Hours later, on any instance:
    sandbox = await place.attach()
    result = await (await sandbox.follow("count")).wait(check=True)
    print("the command went on and wrote", len(result.stdout.split()), "lines")
    print("the file says", await sandbox.read_text("/srv/note"), end="")
    await sandbox.kill()


asyncio.run(main())
