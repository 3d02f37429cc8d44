# SPDX-License-Identifier: Apache-2.0
"""One direction of an epoch, on a CPU: each message as soon as its flags are raised.

`stream_lanes` has the same for GPUs, where all of a step's messages are queued at once, and
`gpu_link` chooses.
"""

from __future__ import annotations

from collections import deque

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError
from tandemkv.cache_rank.protocol.step_ring import StepEntry

from .contents import Contents
from .plan import Flag, FlagKind, Message
from .records import Op, Outbox, Record
from .side import Side


class HostSendLane:
    """Sends the messages of steps, in order, each as a record of `out`; the thread waits.

    `is_lost`: what a message of the present step waited for was not raised; False while nobody
    knows.
    """

    def __init__(self, side: Side, contents: Contents, out: Outbox) -> None:
        self._side, self._contents, self._out = side, contents, out
        self._step, self.is_lost = 0, False

    def begin(self, entry: StepEntry, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Begin to send the `messages` of `entry`; returns those for `send`: all."""
        self._step, self.is_lost = entry.step, False
        self._contents.begin(entry)
        return messages

    def send(self, message: Message) -> None:
        """Send a message once its flags are raised; without its content if they are not.

        Raises `CacheRankLostError` if the epoch is over.
        """
        for flag in message.waits:
            self._wait(flag)
        if self.is_lost:  # that the step has ended is true all the same
            self._out.put(Op.MESSAGE, self._step if message.is_last else 0)
        else:
            body, width = self._contents.gather(message)
            self._out.put(Op.MESSAGE, self._step, width, body.whole)
        self._out.flush()

    def _wait(self, flag: Flag) -> None:
        number = host_flag(self._side, flag)
        if flag.kind is FlagKind.FINISHED:
            if not self._side.wait_always(number, self._step):
                raise CacheRankLostError("the epoch is over")
        elif flag.kind is not FlagKind.BEGIN and not self.is_lost:
            self.is_lost = not self._side.wait(number, self._step)


class HostReceiveLane:
    """Writes the messages of steps, in order, and raises their flags.

    `is_queued`: all of a step's are received by `begin` alone, which waits for none; else each
    comes as a record, for `take`.
    """

    is_queued = False

    def __init__(self, side: Side, contents: Contents) -> None:
        self._side, self._contents = side, contents
        self._due: deque[Message] = deque()
        self._step = 0

    @property
    def is_done(self) -> bool:
        """Whether no record of a step is due."""
        return not self._due

    def begin(self, entry: StepEntry, messages: tuple[Message, ...]) -> None:
        """Let what comes be the `messages` of `entry`; raises `ProtocolError` if others are due."""
        if self._due:
            raise ProtocolError(f"{len(self._due)} messages of step {self._step} have not come")
        self._step, self._due = entry.step, deque(messages)
        self._contents.begin(entry)

    def take(self, record: Record) -> None:
        """Write the next message; raises `ProtocolError` if it is not what is due."""
        if not self._due or record.a not in (0, self._step):
            raise ProtocolError(f"a message of step {record.a} came, and none of it is due")
        message = self._due.popleft()
        if not record.a:
            return
        if len(record.content):
            body = self._contents.view(message, record.content, record.b)
            if body is None:
                raise ProtocolError(f"{len(record.content)} bytes are no message of this step")
            self._contents.scatter(body)
        elif not message.is_last:
            raise ProtocolError("a message without content")
        for flag in message.raises:
            if flag.kind is not FlagKind.BEGIN:  # it was announced behind that
                self._side.flags.raise_to(host_flag(self._side, flag), self._step)


def host_flag(side: Side, flag: Flag) -> int:
    """Return the number of a flag in host memory."""
    at = side.at
    if flag.kind is FlagKind.INPUT:
        return at.input(flag.layer)
    if flag.kind is FlagKind.QUERY:
        return at.query(flag.layer)
    if flag.kind is FlagKind.READY:
        return at.ready(flag.layer)
    return at.FINISHED if flag.kind is FlagKind.FINISHED else at.input(at.end)
