"""One connection, from its handshake to its end: routes events to commands and callers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Optional, Sequence, Union

from websockets.exceptions import ConnectionClosed

from . import protocol, seam
from .connect import Socket
from .errors import EndedError, ExecLostError, ProtocolError, RefusedError, of_update
from .exec import ASKED, Exec, Result
from .mirror import Leave, Sent
from .pipe import Hole
from .protocol import ExecView, Forked, Found, Gap, Hello, Rewound, Said, Status, StdinAck, Update
from .verdict import Heard, Verdict

if TYPE_CHECKING:
    from .link import Link

_log = logging.getLogger("baton_sandbox")

#: After its last word the server closes at once.
LAST_WORDS = 2.0
#: Above this nothing more is taken from callers.
QUEUE_BYTES = 512 << 10


class Session:
    def __init__(self, link: Link, socket: Socket, *, is_new: bool, give_up: Optional[float]) -> None:
        self._link = link
        self._mirror = link.mirror
        self._socket = socket
        self._heard = Heard()
        #: RUNNING came: requests may go.
        self._is_running = False
        self._by_number: dict[int, Exec] = {}
        self._numbers: dict[str, int] = {}
        #: Commands asked for in this session and not answered yet, in order.
        self._asked: deque[str] = deque()
        #: The text of a refusal that named nobody.
        self._unclear: Optional[str] = None
        self._give_up = give_up
        self._leave_at: Optional[float] = None
        self._is_flooded = False
        self._queue: deque[Union[str, bytes]] = deque()
        self._queued = 0
        if is_new:
            self._say(link.config)

    async def run(self) -> Verdict:
        work = [asyncio.ensure_future(part) for part in (self._read(), self._write(), self._watch())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            # What the server said last is worth more than how writing failed.
            verdict = next(task.result() for task in work if task in done)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._close()
        return verdict

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._socket.close(), 2)

    # What comes.

    async def _read(self) -> Verdict:
        try:
            while True:
                message = await self._socket.recv()
                if isinstance(message, str):
                    verdict = self._event(message)
                    if verdict is not None:
                        return verdict
                else:
                    await self._output(message)
        except ConnectionClosed as closed:
            code = None if closed.rcvd is None else closed.rcvd.code
            return self._heard.verdict(code, "the connection was cut")
        except (Hole, ValueError) as error:
            return Verdict(ProtocolError(str(error) or "bytes of the output are missing"), False)

    async def _output(self, frame: bytes) -> None:
        stream, number, offset, payload = protocol.decode_chunk(frame)
        exec = self._by_number.get(number)
        if exec is None or stream not in protocol.OUTPUTS:
            return
        exec.pipes[protocol.OUTPUTS[stream]].push(offset, payload)
        if exec.is_flooded:
            self._is_flooded = True
            await exec.bell.until(lambda: None if exec.is_flooded else True)
            self._socket.heard_at = seam.now()
            self._is_flooded = False

    def _event(self, text: str) -> Optional[Verdict]:
        event = protocol.parse(text)
        if isinstance(event, Update):
            return self._update(event)
        if isinstance(event, Found):
            self._mirror.place = event
        elif isinstance(event, Hello):
            if event.protocol != protocol.VERSION:
                return Verdict(ProtocolError(f"the server speaks version {event.protocol}"), False)
            self._mirror.instance = event.instance
        elif isinstance(event, Said):
            self._heard.error = event.message
        elif isinstance(event, Forked):
            self._mirror.forked(event.sandboxes)
        elif isinstance(event, (StdinAck, Gap, Rewound)):
            exec = self._link.execs.get(event.exec_id)
            if exec is None:
                return None
            if isinstance(event, StdinAck):
                exec.stdin_ack(event.offset)
                self._link.look()
            elif isinstance(event, Gap):
                exec.pipes[event.stream].gap(event.end)
            else:
                exec.pipes[event.stream].rewind(event.to)
        return None

    def _update(self, update: Update) -> Optional[Verdict]:
        verdict = self._heard.update(update)
        if self._heard.is_last and self._leave_at is None:
            self._leave_at = seam.now() + LAST_WORDS
        status = update.status
        if status is Status.RUNNING and not self._is_running:
            self._begin(update.execs)
        elif status is Status.EXECUTION_RUNNING:
            self._started(update)
        elif status is Status.EXECUTION_DONE:
            self._done(update)
        elif status in (Status.EXECUTION_ERROR, Status.EXECUTION_UNSUPPORTED_LANGUAGE_ERROR):
            self._refused(update)
        elif status is Status.STDIN_ERROR:
            self._stdin_refused(update)
        if self._link.options.on_status is not None:
            try:
                self._link.options.on_status(update)
            except Exception:
                # A caller's mistake must not cut its own connection.
                _log.exception("on_status failed")
        self._mirror.update(update)
        return verdict

    # What goes.

    def _say(self, request: protocol.Request) -> None:
        self._push(json.dumps(request, ensure_ascii=False, separators=(",", ":")))

    def _push(self, message: Union[str, bytes]) -> None:
        self._queued += len(message)
        self._queue.append(message)
        self._link.look()

    @property
    def _has_room(self) -> bool:
        return self._queued < QUEUE_BYTES

    async def _write(self) -> Verdict:
        while True:
            await self._link.looked_for()
            verdict = self._feed()
            while self._queue:
                message = self._queue.popleft()
                self._queued -= len(message)
                try:
                    await self._socket.send(message)
                except ConnectionClosed:
                    # What the server said before it closed is still to be read; the reader tells.
                    await asyncio.Event().wait()
                verdict = verdict or self._feed()
            if verdict is not None:
                return verdict

    def _feed(self) -> Optional[Verdict]:
        """Takes what callers want and what became due: acknowledgements and stdin."""
        if not self._is_running:
            return None
        while self._link.commands and self._has_room:
            command = self._link.commands.popleft()
            if isinstance(command, Leave):
                return Verdict(EndedError("it was closed"), False)
            if isinstance(command, Exec):
                self._exec(command)
            elif command.sent is None:
                self._say(command.request)
            elif not command.sent.done():
                command.sent.set_result(Sent(self._mirror.heard, self._mirror.sessions))
                self._say(command.request)
        for exec in self._link.execs.values():
            offsets = exec.take_ack()
            if offsets is not None:
                self._say(protocol.ack(exec.id, *offsets))
            number = self._numbers.get(exec.id)
            while number is not None and self._has_room:
                part = exec.stdin.next()
                if part is None:
                    break
                offset, data = part
                if data is None:
                    self._say(protocol.stdin(exec.id, eof=True, offset=offset))
                else:
                    self._push(protocol.encode_chunk(protocol.STDIN, number, offset, data))
        return None

    async def _watch(self) -> Verdict:
        """Silence and other deadlines."""
        self._socket.heard_at = seam.now()
        silence = self._link.options.silence
        while True:
            deadlines = [self._socket.heard_at + silence if not self._is_flooded else seam.now() + silence]
            if self._leave_at is not None:
                deadlines.append(self._leave_at)
            if self._give_up is not None and not self._is_running:
                deadlines.append(self._give_up)
            left = min(deadlines) - seam.now()
            if left <= 0:
                return self._heard.verdict(None, "the server fell silent")
            await asyncio.sleep(min(left, 0.5))

    # The commands of this connection: asked for, taken up, ended, refused.

    def _exec(self, exec: Exec) -> None:
        if exec.id in self._link.execs:
            exec.ended(RefusedError("the exec id is in use", Status.EXECUTION_ERROR.value))
            return
        self._link.execs[exec.id] = exec
        if exec.request is not None:
            self._ask(exec)
            return
        for view in self._mirror.execs:
            if view.exec_id == exec.id:
                self._number(view.exec, exec)
        self._say(protocol.reconnect({exec.id: exec.resume()}))

    def _ask(self, exec: Exec) -> None:
        assert exec.request is not None
        self._asked.append(exec.id)
        self._say(exec.request)

    def _number(self, number: int, exec: Exec) -> None:
        self._by_number[number] = exec
        self._numbers[exec.id] = number

    def _begin(self, views: Optional[Sequence[ExecView]]) -> None:
        """RUNNING: takes up every command where it was left."""
        self._is_running = True
        known = {view.exec_id: view for view in views or ()}
        offsets: dict[str, tuple[int, int]] = {}
        for exec in list(self._link.execs.values()):
            view = known.get(exec.id)
            if view is not None:
                self._number(view.exec, exec)
                exec.started()
                if view.stdin < exec.stdin.acked:
                    self._lose(exec, "the sandbox went back to before input that it had taken")
                    continue
                exec.stdin_ack(view.stdin)
            elif exec.stage == ASKED:
                # The request was lost with the last connection: ask again.
                self._ask(exec)
                continue
            elif views is not None:
                self._lose(exec, "the sandbox does not know the command any more")
                continue
            offsets[exec.id] = exec.resume()
            if exec.kill_wanted:
                self._say(protocol.kill_process(exec.id))
        if offsets:
            self._say(protocol.reconnect(offsets))
        self._mirror.sessions += 1
        self._mirror.is_open = True
        self._mirror.execs = tuple(views or ())
        self._link.look()

    def _lose(self, exec: Exec, text: str) -> None:
        del self._link.execs[exec.id]
        self._forget(exec)
        exec.ended(ExecLostError(text))

    def _started(self, update: Update) -> None:
        exec = self._link.execs.get(update.exec_id or "")
        if exec is None or update.exec is None:
            return
        self._not_asked(exec.id)
        self._number(update.exec, exec)
        exec.started()
        self._link.look()

    def _done(self, update: Update) -> None:
        exec = self._link.execs.pop(update.exec_id or "", None)
        if exec is None:
            return
        self._forget(exec)
        # Everything is here: the server need not keep it.
        self._say(protocol.ack(exec.id, *exec.received))
        duration = None if update.duration_ms is None else update.duration_ms / 1000
        exec.ended(
            Result(
                exit_code=update.exit_code, signal=update.signal, timed_out=update.timed_out, duration=duration
            )
        )

    def _refused(self, update: Update) -> None:
        """A command did not start, or is gone; or, without a name, something else was not right."""
        if update.exec_id is not None:
            self._lost(update.exec_id, update)
        elif len(self._asked) == 1 and len(self._link.execs) == 1:
            # There is nothing else it could be about.
            self._lost(self._asked[0], update)
        elif self._asked:
            # It may be about any of them, or about input. Of those named now the server names what it does not know.
            self._unclear = update.message
            self._say(protocol.reconnect({exec_id: (0, 0) for exec_id in self._asked}))

    def _lost(self, exec_id: str, update: Update) -> None:
        exec = self._link.execs.pop(exec_id, None)
        if exec is None:
            return
        self._not_asked(exec_id)
        self._forget(exec)
        if exec.stage == ASKED:
            message, self._unclear = self._unclear or update.message, None
            exec.ended(of_update(Update(update.status, message)))
        else:
            exec.ended(ExecLostError(update.message or "the command is gone"))

    def _stdin_refused(self, update: Update) -> None:
        """Nobody reads it any more. Without a name it is about the only one that has input under way, if that is so."""
        about = [
            exec
            for exec in self._link.execs.values()
            if (exec.id == update.exec_id if update.exec_id is not None else exec.stdin.is_under_way)
        ]
        if len(about) == 1:
            about[0].stdin_over()

    def _not_asked(self, exec_id: str) -> None:
        with contextlib.suppress(ValueError):
            self._asked.remove(exec_id)

    def _forget(self, exec: Exec) -> None:
        number = self._numbers.pop(exec.id, None)
        if number is not None:
            self._by_number.pop(number, None)
