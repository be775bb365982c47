"""One connection, from its handshake to its end: routes events to commands and callers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Optional, Sequence, Union

from websockets.exceptions import ConnectionClosed

from . import clock, protocol, requests
from .connect import Socket
from .errors import EndedError, ExecLostError, ProtocolError, RefusedError, from_update
from .exec import REQUESTED, Exec
from .protocol import (
    EgressDenied,
    ErrorText,
    ExecView,
    Forked,
    Hello,
    Identity,
    IdleTimeout,
    OutputGap,
    OutputRewound,
    RolledBack,
    Status,
    StdinAck,
    Update,
)
from .result import Result
from .retry_policy import ConnectionSummary, RetryPolicy, fatal
from .state import Close, Sent
from .stdin import StdinConflict
from .stream import MissingBytes

if TYPE_CHECKING:
    from .link import Link

_log = logging.getLogger("baton_sandbox")

#: How long to wait for the close frame after the last event.
CLOSE_WITHIN = 2.0
#: Above this many queued bytes no more work is taken from callers.
MAX_QUEUED = 512 << 10


class Session:
    def __init__(self, link: Link, socket: Socket, *, is_new: bool, deadline: Optional[float]) -> None:
        self._link = link
        self._state = link.state
        self._socket = socket
        self._summary = ConnectionSummary()
        #: RUNNING has arrived: requests may be sent.
        self._is_running = False
        #: The sandbox was rolled back right before this session.
        self._rolled_back = False
        self._by_number: dict[int, Exec] = {}
        self._numbers: dict[str, int] = {}
        #: Commands requested in this session and not answered yet, in order.
        self._requested: deque[str] = deque()
        #: The message of a refusal that named no command.
        self._unclear: Optional[str] = None
        self._deadline = deadline
        self._close_at: Optional[float] = None
        self._is_full = False
        self._queue: deque[Union[str, bytes]] = deque()
        self._queued = 0
        if is_new:
            self._send(link.config)

    async def run(self) -> RetryPolicy:
        work = [asyncio.ensure_future(part) for part in (self._read(), self._write(), self._watch())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            # The last words of the server explain more than a failed write: the reader is first in the list.
            policy = next(task.result() for task in work if task in done)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._close()
        return policy

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await clock.wait_for(self._socket.close(), 2)

    # Receiving.

    async def _read(self) -> RetryPolicy:
        try:
            while True:
                message = await self._socket.recv()
                if isinstance(message, str):
                    policy = self._event(message)
                    if policy is not None:
                        return policy
                else:
                    await self._output(message)
        except ConnectionClosed as closed:
            code = None if closed.rcvd is None else closed.rcvd.code
            return self._summary.policy(code, "the connection was cut")
        except (MissingBytes, ValueError) as error:
            return fatal(ProtocolError(str(error) or "bytes of the output are missing"))

    async def _output(self, frame: bytes) -> None:
        stream, number, offset, payload = protocol.decode_chunk(frame)
        exec = self._by_number.get(number)
        if exec is None or stream not in protocol.OUTPUTS:
            return
        exec.streams[protocol.OUTPUTS[stream]].push(offset, payload)
        if exec.is_full:
            self._is_full = True
            await exec.changed.until(lambda: None if exec.is_full else True)
            self._socket.received_at = clock.now()
            self._is_full = False

    def _event(self, text: str) -> Optional[RetryPolicy]:
        event = protocol.parse(text)
        if isinstance(event, Update):
            return self._update(event)
        if isinstance(event, Identity):
            self._state.identity = event
        elif isinstance(event, Hello):
            if event.protocol != protocol.VERSION:
                return fatal(ProtocolError(f"the server speaks version {event.protocol}"))
            self._state.instance = event.instance
        elif isinstance(event, ErrorText):
            self._summary.error = event.message
        elif isinstance(event, Forked):
            self._state.forked(event.sandboxes)
        elif isinstance(event, IdleTimeout):
            self._state.idle_timeout_changed(event)
        elif isinstance(event, RolledBack):
            self._link.rolled_back(event)
        elif isinstance(event, EgressDenied):
            self._link.egress_denied(event)
        elif isinstance(event, (StdinAck, OutputGap, OutputRewound)):
            exec = self._link.execs.get(event.exec_id)
            if exec is None:
                return None
            if isinstance(event, StdinAck):
                exec.stdin_ack(event.offset)
                self._link.wake()
            elif isinstance(event, OutputGap):
                exec.streams[event.stream].gap(event.end)
            else:
                exec.rolled_back = True
                exec.streams[event.stream].rewind(event.to)
        return None

    def _update(self, update: Update) -> Optional[RetryPolicy]:
        policy = self._summary.update(update)
        if self._summary.is_last and self._close_at is None:
            self._close_at = clock.now() + CLOSE_WITHIN
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
                # An error in the callback must not break the connection.
                _log.exception("on_status failed")
        self._state.update(update)
        return policy

    # Sending.

    def _send(self, request: requests.Request) -> None:
        self._push(json.dumps(request, ensure_ascii=False, separators=(",", ":")))

    def _push(self, message: Union[str, bytes]) -> None:
        self._queued += len(message)
        self._queue.append(message)
        self._link.wake()

    @property
    def _has_space(self) -> bool:
        return self._queued < MAX_QUEUED

    async def _write(self) -> RetryPolicy:
        while True:
            await self._link.woken()
            policy = self._feed()
            while self._queue:
                message = self._queue.popleft()
                self._queued -= len(message)
                try:
                    await self._socket.send(message)
                except ConnectionClosed:
                    # The reader still has to read what the server sent before it closed, and decides.
                    await asyncio.Event().wait()
                policy = policy or self._feed()
            if policy is not None:
                return policy

    def _feed(self) -> Optional[RetryPolicy]:
        """Queues what callers asked for, and what became due: acknowledgements and stdin."""
        if not self._is_running:
            return None
        while self._link.commands and self._has_space:
            command = self._link.commands.popleft()
            if isinstance(command, Close):
                return fatal(EndedError("the connection was closed"))
            if isinstance(command, Exec):
                self._exec(command)
            elif command.sent is None:
                self._send(command.request)
            elif not command.sent.done():
                command.sent.set_result(Sent(self._state.events, self._state.sessions))
                self._send(command.request)
        for exec in self._link.execs.values():
            offsets = exec.take_ack()
            if offsets is not None:
                self._send(requests.ack(exec.id, *offsets))
            number = self._numbers.get(exec.id)
            while number is not None and self._has_space:
                part = exec.stdin.next()
                if part is None:
                    break
                offset, data = part
                if data is None:
                    self._send(requests.stdin(exec.id, eof=True, offset=offset))
                else:
                    self._push(protocol.encode_chunk(protocol.STDIN, number, offset, data))
        return None

    async def _watch(self) -> RetryPolicy:
        """Silence and other deadlines."""
        self._socket.received_at = clock.now()
        silence = self._link.options.silence
        while True:
            deadlines = [self._socket.received_at + silence if not self._is_full else clock.now() + silence]
            if self._close_at is not None:
                deadlines.append(self._close_at)
            if self._deadline is not None and not self._is_running:
                deadlines.append(self._deadline)
            left = min(deadlines) - clock.now()
            if left <= 0:
                return self._summary.policy(None, "the server stopped responding")
            await asyncio.sleep(min(left, 0.5))

    # The commands of this connection: requested, resumed, ended, refused.

    def _exec(self, exec: Exec) -> None:
        if exec.id in self._link.execs:
            exec.ended(RefusedError("the exec id is in use", Status.EXECUTION_ERROR.value))
            return
        self._link.execs[exec.id] = exec
        if exec.request is not None:
            self._request(exec)
            return
        for view in self._state.execs:
            if view.exec_id == exec.id:
                self._number(view.exec, exec)
                exec.stdin_resume(view.stdin, view.stdin_crc32)
                exec.rolled_back = self._rolled_back
        self._send(requests.reconnect({exec.id: exec.resume_offsets()}))

    def _request(self, exec: Exec) -> None:
        assert exec.request is not None
        self._requested.append(exec.id)
        self._send(exec.request)

    def _number(self, number: int, exec: Exec) -> None:
        self._by_number[number] = exec
        self._numbers[exec.id] = number

    def _begin(self, views: Optional[Sequence[ExecView]]) -> None:
        """RUNNING: resumes every command where it stopped."""
        self._is_running = True
        self._rolled_back, self._state.is_rolling_back = self._state.is_rolling_back, False
        known = {view.exec_id: view for view in views or ()}
        offsets: dict[str, tuple[int, int]] = {}
        for exec in list(self._link.execs.values()):
            view = known.get(exec.id)
            if view is not None:
                self._number(view.exec, exec)
                exec.started()
                exec.rolled_back |= self._rolled_back
                try:
                    exec.stdin_resume(view.stdin, view.stdin_crc32)
                except StdinConflict as conflict:
                    self._lose(exec, str(conflict), conflict.rolled_back or self._rolled_back)
                    continue
            elif exec.phase == REQUESTED:
                # The request was lost with the last connection: send it again.
                self._request(exec)
                continue
            elif views is not None:
                self._lose(exec, "the sandbox no longer knows the command", self._rolled_back)
                continue
            else:
                exec.stdin_resume(exec.stdin.acked)
            offsets[exec.id] = exec.resume_offsets()
            if exec.kill_requested:
                self._send(requests.kill_process(exec.id))
        if offsets:
            self._send(requests.reconnect(offsets))
        self._state.sessions += 1
        self._state.is_open = True
        self._state.execs = tuple(views or ())
        self._link.wake()

    def _lose(self, exec: Exec, text: str, rolled_back: bool) -> None:
        del self._link.execs[exec.id]
        self._forget(exec)
        exec.ended(ExecLostError(text, rolled_back=rolled_back))

    def _started(self, update: Update) -> None:
        exec = self._link.execs.get(update.exec_id or "")
        if exec is None or update.exec is None:
            return
        self._answered(exec.id)
        self._number(update.exec, exec)
        exec.started()
        self._link.wake()

    def _done(self, update: Update) -> None:
        exec = self._link.execs.pop(update.exec_id or "", None)
        if exec is None:
            return
        self._forget(exec)
        # Everything has arrived: the server need not keep it.
        self._send(requests.ack(exec.id, *exec.received))
        duration = None if update.duration_ms is None else update.duration_ms / 1000
        exec.ended(
            Result(
                exit_code=update.exit_code, signal=update.signal, timed_out=update.timed_out, duration=duration
            )
        )

    def _refused(self, update: Update) -> None:
        """A command did not start or is lost; without an exec id, something else was refused."""
        if update.exec_id is not None:
            self._lost(update.exec_id, update)
        elif len(self._requested) == 1 and len(self._link.execs) == 1:
            # Only this command can be meant.
            self._lost(self._requested[0], update)
        elif self._requested:
            # Any of them, or input, may be meant. The reconnect makes the server name those that it does not know.
            self._unclear = update.message
            self._send(requests.reconnect({exec_id: (0, 0) for exec_id in self._requested}))

    def _lost(self, exec_id: str, update: Update) -> None:
        exec = self._link.execs.pop(exec_id, None)
        if exec is None:
            return
        self._answered(exec_id)
        self._forget(exec)
        if exec.phase == REQUESTED:
            message, self._unclear = self._unclear or update.message, None
            exec.ended(from_update(Update(update.status, message)))
        else:
            exec.ended(ExecLostError(update.message or "the command is lost", rolled_back=self._rolled_back))

    def _stdin_refused(self, update: Update) -> None:
        """Stdin is no longer read. Without an exec id, the only command with unacknowledged input is meant, if any."""
        about = [
            exec
            for exec in self._link.execs.values()
            if (exec.id == update.exec_id if update.exec_id is not None else exec.stdin.is_in_flight)
        ]
        if len(about) == 1:
            about[0].stdin_over()

    def _answered(self, exec_id: str) -> None:
        with contextlib.suppress(ValueError):
            self._requested.remove(exec_id)

    def _forget(self, exec: Exec) -> None:
        number = self._numbers.pop(exec.id, None)
        if number is not None:
            self._by_number.pop(number, None)
