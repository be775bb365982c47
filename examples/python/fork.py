"""Copy a running sandbox with its memory and commands, and let each copy do something else."""

import asyncio

from baton_sandbox import Sandbox, SandboxRef

# Loads its data once and then answers questions. Only the first sandbox does the slow part.
SERVICE = """
import sys
table = {n: n * n for n in range(100_000)}
print("ready", flush=True)
for line in sys.stdin:
    print(table[int(line)], flush=True)
"""


async def ask(ref: SandboxRef, number: int) -> str:
    copy = await ref.attach()
    service = await copy.follow("service")
    await service.write_stdin(f"{number}\n")
    await service.close_stdin()
    answer = (await service.wait(check=True)).stdout.split()[-1]
    await copy.kill()
    return answer


async def main() -> None:
    sandbox = await Sandbox.create(persistent=True)
    service = await sandbox.exec(SERVICE, language="python", stdin=True, exec_id="service")
    async for line in service.stdout.lines():
        print("the first one is", line)
        break

    refs = await sandbox.fork(3)
    answers = await asyncio.gather(*(ask(ref, 10 * (i + 1)) for i, ref in enumerate(refs)))
    print("three copies answer", ", ".join(answers))
    await sandbox.kill()


asyncio.run(main())
