"""Run commands and code in a new sandbox, with input, streamed output, and files."""

import asyncio

from baton_sandbox import Sandbox


async def main() -> None:
    # Without an address it uses BATON_URL. The sandbox is deleted at the end of the block.
    async with await Sandbox.create() as sandbox:
        result = await sandbox.run("uname -s; echo oops >&2; exit 3")
        print(result)

        result = await sandbox.run_code("print(sum(range(10)))")
        print("python says", result.stdout.strip())

        counting = await sandbox.exec("for i in 1 2 3; do echo tick $i; sleep 0.1; done")
        async for line in counting.stdout.lines():
            print("streamed:", line)
        print("exit code", (await counting.wait()).exit_code)

        upper = await sandbox.run(["tr", "a-z", "A-Z"], stdin="some input")
        print(upper.stdout)

        await sandbox.write_file("/app/data.csv", "a,b\n1,2\n")
        print([entry.name for entry in await sandbox.list_files("/app")], await sandbox.read_text("/app/data.csv"))


asyncio.run(main())
