# SPDX-License-Identifier: Apache-2.0
"""The process that stands for a cache rank on the host of its inference rank."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch

from tandemkv.cache_rank.protocol.control import ControlServer
from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
    TandemKVError,
)
from tandemkv.cache_rank.protocol.handshake import refusal_for, still_waits
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatServer
from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec, has_hung_up
from tandemkv.cache_rank.protocol.memory.descriptor_socket import DescriptorListener, send_tensors
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_devices import differing_gpu, gpu_uuids
from tandemkv.cache_rank.protocol.memory.shared_region import (
    POOL,
    STAMPS,
    RegionSizes,
    check_agreed,
)
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.message.data_plane import INFERENCE_END, TOKEN_BYTES, DataPlane
from tandemkv.cache_rank.protocol.message.door import Caller
from tandemkv.cache_rank.protocol.message.keys import KeyPair
from tandemkv.cache_rank.protocol.message.letters import (
    Ended,
    Knock,
    Meet,
    Met,
    Opened,
)
from tandemkv.cache_rank.protocol.message.opening import opening_s
from tandemkv.cache_rank.protocol.messages import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Refused,
    StatusReply,
    StatusRequest,
    Welcome,
)
from tandemkv.cache_rank.protocol.models.predictor_weights import weights_for
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .contents import Contents
from .gpu_link import Wires, make_lanes, meet_host
from .near import NearReceiver, NearSender, Progress
from .records import PIECE_BYTES, Op, Outbox
from .session import MEMORY_S, REPLACED, Pulse, PumpSession
from .side import Side
from .stream_lanes import rehearse_flags

_LOG = logging.getLogger(__name__)
_POLL_S, _TIMEOUT_S = 0.05, 25.0


class NearPump:
    """Serves the run directory of an inference rank as its cache rank does, by messages.

    A name in `address` is looked up for each epoch; `keys` and `server` are as for `Caller`. K/V
    come to the interface that leads to the cache rank. Without `homes` the inference rank's memory
    is the host's. Raises `CacheRankError` if another live process serves the run directory.
    """

    def __init__(
        self,
        run_dir: RunDir,
        settings: RankSettings,
        address: LinkAddress,
        keys: KeyPair,
        server: bytes,
        rank: int = 0,
        homes: Homes | None = None,
    ) -> None:
        self._run_dir, self._settings, self._exchange = run_dir, settings, settings.exchange
        self._homes = homes or Homes.on_host()
        self._address, self._keys, self._server = address, keys, server
        self._rank, self._stop = rank, threading.Event()
        self._session: PumpSession | None = None
        self._caller: Caller | None = None
        self._pulse = Pulse(self._exchange)
        rehearse_flags(self._homes.here, self._exchange.transfer_timeout_s)
        with contextlib.ExitStack() as made:
            self._control = ControlServer(run_dir)
            made.callback(self._control.close)
            self._listener = DescriptorListener(run_dir.memory_socket)
            made.callback(self._listener.close)
            self._heartbeat = HeartbeatServer(
                run_dir.heartbeat_socket,
                self._exchange,
                busy=lambda: 0.0,
                status=self.status,
                on_silence=self._end_silent,
            )
            made.pop_all()

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        self._stop = stop
        try:
            while not stop.is_set():
                received = self._control.poll(_POLL_S)
                if received is not None:
                    self._handle(*received)
                self._tend()
        finally:
            self._close_epoch("the pump stops")
            self._heartbeat.close()
            self._listener.close()
            self._control.close()

    def status(self) -> StatusReply:
        """Return counters and gauges. Safe from any thread."""
        session = self._session
        values = {"stalled_s": 0.0}
        if session is not None:
            values["link_sent_bytes"] = float(session.plane.bytes_sent)
            values["link_received_bytes"] = float(session.plane.bytes_received)
        return StatusReply(
            role="pump",
            epoch=0 if session is None else session.epoch,
            ready=True,
            values=values,
            info={"address": str(self._address), "pid": str(os.getpid())},
        )

    def _handle(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                self._open(peer, message)
            case StatusRequest():
                self._control.send(peer, self.status())
            case Goodbye():
                if self._session is not None and message.epoch == self._session.epoch:
                    self._close_epoch("goodbye")
            case _:
                _LOG.warning("ignored %s", type(message).__name__)

    def _tend(self) -> None:
        """Look after the epoch: both ends alive, and nothing broken."""
        session, caller = self._session, self._caller
        if session is None or caller is None:
            return
        try:
            while (letter := caller.receive(0.0)) is not None:
                self._pulse.hear()
                if isinstance(letter, Ended):
                    session.end(letter.reason)
                elif not isinstance(letter, HeartbeatReply):
                    raise ProtocolError(f"{type(letter).__name__} came in the middle of an epoch")
            if self._pulse.is_due():
                caller.send(Heartbeat(epoch=session.epoch, sequence=self._pulse.sequence))
        except TandemKVError as error:
            session.end(str(error))
        if self._pulse.is_over():
            session.end(f"no heartbeat from {self._address}")
        if has_hung_up(session.connection):
            session.end("the inference rank is gone")
        if session.is_over():
            self._close_epoch(session.reason)

    def _open(self, peer: bytes, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token, self._run_dir.token):
            text = "the tokens differ; start both with the same --run-dir"
            self._control.send(peer, Refused(field="token", message=text))
            return
        reason = differing_gpu(hello.gpus, gpu_uuids(self._homes))
        if reason is not None:
            self._control.send(peer, Refused(field="gpus", message=reason))
            return
        # It may have waited for long: who gave up must not end another's epoch.
        is_there = partial(still_waits, self._control.send, peer)
        if not is_there():
            return
        caller: Caller | None = None
        try:
            caller = Caller(self._address.resolved(), self._keys, self._server)
            bare = msgspec.structs.replace(hello, token=b"")
            knock = Knock(PROTOCOL_VERSION, bare, self._rank)
            reply = caller.knock(knock, _TIMEOUT_S, self._tend)
            self._close_epoch(REPLACED)  # not before: who is refused ends nothing
            self._heartbeat.expect(reply.welcome.epoch)
            if not self._control.send(peer, reply.welcome):
                raise CacheRankLostError("the inference rank has given up")
            self._session = self._begin(caller, hello, reply.welcome, is_there)
        except Exception as error:  # whatever it is, another epoch may be sound
            _LOG.warning("no epoch: %s", error, exc_info=True)
            self._control.send(peer, refusal_for(error))
            if self._session is None:
                self._heartbeat.forget()
            if caller is not None:
                caller.close()
            return
        self._caller, self._pulse = caller, Pulse(self._exchange)
        _LOG.info("epoch %d, with %s", self._session.epoch, self._address)

    def _begin(
        self, caller: Caller, hello: Hello, welcome: Welcome, is_there: Callable[[], bool]
    ) -> PumpSession:
        """Take the inference rank's memory, open the data plane, and start the threads."""
        connection, tensors = self._listener.accept(
            self._homes,
            token=self._run_dir.token,
            epoch=welcome.epoch,
            timeout_s=MEMORY_S,
            is_there=is_there,
        )
        made = MappedTensors()
        plane: DataPlane | None = None
        try:
            shard = self._check_tensors(tensors, hello)
            # Beside a GPU each cache rank has weights of its own, of its heads alone.
            extra = weights_for(tensors, HeadShard() if self._homes.are_on_gpu else shard)
            plane, wires = self._meet(caller, welcome.epoch, tensors, extra)
            memory = self._hand_over(caller, plane, extra, connection)
            made.allocate(STAMPS, (1,), torch.int64, "host").fill_(memory)
            send_tensors(connection, made)
        except BaseException as error:
            if plane is not None:
                plane.close()
            with contextlib.suppress(OSError):  # it may be gone, and that the reason
                send_tensors(connection, error=refusal_for(error).message)
            connection.close()
            tensors.close()
            made.close()
            if isinstance(error, OSError):
                raise CacheRankLostError(f"the inference rank is gone: {error}") from error
            raise
        session = PumpSession(welcome.epoch, plane, connection, (tensors, made))
        try:
            program = EngineProgram(
                hello.model, self._settings, welcome.traits, page_size=hello.page_size
            )
            side = Side(tensors, program, self._settings.selection, session.is_over, shard)
            self._start(session, side, wires)
        except BaseException:
            session.close()
            raise
        return session

    def _check_tensors(self, tensors: MappedTensors, hello: Hello) -> HeadShard:
        """Return which of the KV heads are this cache rank's; raises as `check_agreed`."""
        placement, kv = self._settings.placement, tensors.get(POOL)
        count = placement.head_shards
        if kv is None or kv.ndim != 5 or kv.shape[3] < count:
            raise ProtocolError(f"there is no mapped tensor {POOL!r} with {count} KV heads or more")
        shard = HeadShard(self._rank % count, count, kv.shape[3])
        sizes = RegionSizes(
            num_slots=kv.shape[2],
            num_rows=hello.max_rows + 1,
            page_size=hello.page_size,
            is_apart=placement.has_far_pool,
            shard=shard,
            num_sharing=count,  # as inference ranks make theirs
            has_whole_pool=placement.has_far_host,
        )
        check_agreed(tensors, hello.model, self._settings.selection, sizes)
        return shard

    def _start(self, session: PumpSession, side: Side, wires: Wires) -> None:
        plane, progress = session.plane, Progress(side)
        sent, received, out = Contents(side), Contents(side), Outbox(plane, progress.note)
        lanes = make_lanes(side, sent, received, out, wires, self._exchange.transfer_timeout_s)
        receiver = NearReceiver(side, received.plan, plane, lanes.receives, progress)
        sender = NearSender(side, sent.plan, out, lanes.sends, receiver)
        queues = (receiver.run_queued,) if lanes.receives.is_queued else ()
        session.start(lanes, sender.run, receiver.run, *queues)

    def _meet(
        self, caller: Caller, epoch: int, tensors: MappedTensors, extra: Mapping[str, torch.Tensor]
    ) -> tuple[DataPlane, Wires]:
        """Return the data plane, and between GPUs wires; the other end is told what `extra` is."""
        is_new = STAMPS not in tensors or not int(tensors[STAMPS][0])
        homes = {x.name: x.home for x in tensors.specs}
        specs = tuple(
            TensorSpec(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), homes[name])
            for name, x in extra.items()
        )
        token = os.urandom(TOKEN_BYTES)
        limit_s = _TIMEOUT_S + opening_s(tensors.specs)  # the other host makes its memory first

        def tell(place: bytes, wires: tuple[bytes, ...]) -> bytes:
            met = caller.request(Meet(epoch, place, token, specs, is_new, wires), limit_s)
            if isinstance(met, Ended):
                raise HandshakeRefusedError("memory", met.reason)
            if not isinstance(met, Met):
                raise ProtocolError(f"Meet was answered with {type(met).__name__}")
            return met.place

        return meet_host(
            INFERENCE_END, self._homes.here, caller.address.own_host(), self._settings, limit_s,
            token, tell,
        )  # fmt: skip

    def _hand_over(
        self, caller: Caller, plane: DataPlane, extra: Mapping[str, torch.Tensor],
        connection: socket.socket,
    ) -> int:  # fmt: skip
        """Send `extra` in pieces; returns the name of the memory at the other end."""

        def look() -> None:
            if self._stop.is_set():
                raise CacheRankLostError("the pump stops")
            if has_hung_up(connection):
                raise CacheRankLostError("the inference rank is gone")

        out = Outbox(plane)
        for number, tensor in enumerate(extra.values()):
            content = tensor.reshape(-1).view(torch.uint8)
            for first in range(0, len(content), PIECE_BYTES):
                out.put(Op.TENSOR, number, first, content[first : first + PIECE_BYTES])
        out.put(Op.END)
        out.flush()
        # The other host's engine is built meanwhile.
        opened = caller.receive(_TIMEOUT_S + self._exchange.transfer_timeout_s, look)
        if isinstance(opened, Ended):
            raise HandshakeRefusedError("memory", opened.reason)
        if not isinstance(opened, Opened):
            raise CacheRankLostError(f"{self._address}: its engine does not begin")
        return opened.memory

    def _end_silent(self, epoch: int) -> None:
        session = self._session
        if session is not None and session.epoch == epoch:
            session.end("the inference rank is silent")

    def _close_epoch(self, reason: str) -> None:
        session, self._session = self._session, None
        caller, self._caller = self._caller, None
        self._heartbeat.forget()
        if session is not None:
            _LOG.info("epoch %d ends: %s", session.epoch, session.reason or reason)
            if caller is not None:
                try:
                    caller.send(Ended(epoch=session.epoch, reason=reason[:MAX_TEXT]))
                except TandemKVError as error:
                    _LOG.info("the other host was not told: %s", error)
            session.close()
        if caller is not None:
            caller.close()
