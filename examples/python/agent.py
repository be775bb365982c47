"""A tool loop: a model asks for commands, a sandbox runs them, and the model sees the results.

`model` replaces a real one: it returns the next message of a conversation.
"""

import asyncio
import json
from typing import Any

from baton_sandbox import Sandbox

TOOLS = "run_python(code), run_bash(command), write_file(path, text)"


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Plays a model that computes, makes a mistake, sees it and corrects it."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    script = [
        {"tool": "write_file", "path": "/app/primes.py", "text": "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in range(2, p))]\n"},
        {"tool": "run_python", "code": "from primes import primes; print(primes(30))"},
        {"tool": "run_bash", "command": "cd /app && python3 -c 'from primes import primes; print(primes(30))'"},
    ]
    if len(results) < len(script):
        return {"role": "assistant", "call": script[len(results)]}
    return {"role": "assistant", "content": f"The primes below 30 are {json.loads(results[-1])['stdout'].strip()}"}


async def call(sandbox: Sandbox, wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted["tool"] == "write_file":
        await sandbox.write_file(wanted["path"], wanted["text"])
        return {"ok": True}
    if wanted["tool"] == "run_python":
        result = await sandbox.run_code(wanted["code"], timeout=30)
    else:
        result = await sandbox.run(wanted["command"], timeout=30)
    # The model decides what to do about a failure.
    return {"stdout": result.stdout, "stderr": result.stderr[-2000:], "exit_code": result.exit_code, "timed_out": result.timed_out}


async def main() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You have a sandbox. Tools: {TOOLS}."},
        {"role": "user", "content": "Which primes are there below 30?"},
    ]
    async with await Sandbox.create(idle_timeout="10m", labels={"purpose": "agent"}) as sandbox:
        while True:
            message = model(messages)
            messages.append(message)
            if "call" not in message:
                print(message["content"])
                return
            answer = await call(sandbox, message["call"])
            print(message["call"]["tool"], "->", {name: value for name, value in answer.items() if value})
            messages.append({"role": "tool", "content": json.dumps(answer)})


asyncio.run(main())
