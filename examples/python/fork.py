"""Copy a running sandbox, memory and commands included, and let each copy try something else."""

import asyncio

from baton_sandbox import Place, Sandbox

# Loads something once, then answers: what takes long is done only in the first sandbox.
SERVICE = """
import sys
table = {n: n * n for n in range(100_000)}
print("ready", flush=True)
for line in sys.stdin:
    print(table[int(line)], flush=True)
"""


async def ask(place: Place, number: int) -> str:
    copy = await place.attach()
    service = await copy.follow("service")
    await service.write_stdin(f"{number}\n")
    await service.close_stdin()
    answer = (await service.wait(check=True)).stdout.split()[-1]
    await copy.kill()
    return answer


async def main() -> None:
    sandbox = await Sandbox.create(enable_checkpoint=True)
    service = await sandbox.exec(SERVICE, language="python", stdin=True, exec_id="service")
    async for line in service.stdout.lines():
        print("the first one is", line)
        break

    places = await sandbox.fork(3)
    answers = await asyncio.gather(*(ask(place, 10 * (i + 1)) for i, place in enumerate(places)))
    print("three copies say", ", ".join(answers))
    await sandbox.kill()


asyncio.run(main())
