"""Prepare a file system once, save it under a name, and start any number of sandboxes from it."""

import asyncio
import time

from baton_sandbox import Sandbox


async def main() -> None:
    name = f"example-{time.time_ns()}"
    async with await Sandbox.create() as sandbox:
        await sandbox.write_file("/opt/greet.py", "def greet(name): return f'hello {name}'\n")
        await sandbox.snapshot(name)

    async with await Sandbox.create(filesystem_snapshot_name=name) as sandbox:
        code = "from greet import greet; print(greet('snapshot'))"
        result = await sandbox.run(["python3", "-c", code], cwd="/opt", check=True)
        print(result.stdout, end="")


asyncio.run(main())
