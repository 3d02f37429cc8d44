# SPDX-License-Identifier: Apache-2.0
"""What stands for an inference rank on the host of its cache rank, and holds the K/V there."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
    TandemKVError,
)
from tandemkv.cache_rank.protocol.gpu_flags import flag_specs
from tandemkv.cache_rank.protocol.handshake import open_epoch, refusal_for, still_waits
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatClient, Patience, StatusServer
from tandemkv.cache_rank.protocol.memory.descriptor_messages import (
    BOOKS,
    TensorSpec,
    has_hung_up,
)
from tandemkv.cache_rank.protocol.memory.descriptor_socket import offer_tensors, withdraw_tensors
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_devices import gpu_uuids, same_gpu
from tandemkv.cache_rank.protocol.memory.shared_region import (
    STAMPS,
    RegionSizes,
    RegionSpecs,
    specs_by_life,
)
from tandemkv.cache_rank.protocol.message.data_plane import CACHE_END, DataPlane
from tandemkv.cache_rank.protocol.message.door import Door
from tandemkv.cache_rank.protocol.message.letters import (
    Admitted,
    Ended,
    Knock,
    Letter,
    Meet,
    Met,
    Opened,
)
from tandemkv.cache_rank.protocol.message.opening import most_told
from tandemkv.cache_rank.protocol.messages import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Refused,
    StatusReply,
    Welcome,
    refuse_version,
)
from tandemkv.cache_rank.protocol.models.predictor_weights import PREDICTOR_PREFIX
from tandemkv.cache_rank.protocol.progress import ProgressClock
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .contents import Contents
from .far import Announced, FarReceiver, FarSender
from .gpu_link import Wires, make_lanes, meet_host
from .records import Op, Outbox, read_records
from .session import MEMORY_S, REPLACED, Pulse, PumpSession
from .side import Side
from .stream_lanes import rehearse_flags

_LOG = logging.getLogger(__name__)
_POLL_S, _TIMEOUT_S = 0.05, 20.0
_MAX_WAITING = 64
_SILENT_S = MEMORY_S + 5.0
"""Who was let in may be silent for so long before its first heartbeat: it has memory and lanes to
make. Nobody is kept out meanwhile: who knocks and agrees takes its place."""
_STOPS = "the cache rank's host stops"


@dataclass
class _Guest:
    """An inference rank that was let in; `patience` is longer before its first heartbeat."""

    peer: bytes
    hello: Hello
    welcome: Welcome
    control: ControlClient
    patience: Patience
    session: PumpSession | None = None


class FarPump:
    """Lets one inference rank after the other in, and holds what must survive the cache rank.

    Inference ranks knock at `door`, which is closed with the pump; K/V come to the same interface.
    Those that mean another cache rank than `rank` are refused: it has other KV heads. Without
    `homes` memory is the host's.
    """

    def __init__(
        self, run_dir: RunDir, settings: RankSettings, door: Door, rank: int = 0,
        homes: Homes | None = None,
    ) -> None:  # fmt: skip
        self._run_dir, self._settings, self._door = run_dir, settings, door
        self._rank, self._homes = rank, homes or Homes.on_host()
        self._kept, self._books = MappedTensors(self._homes), MappedTensors(self._homes)
        self._memory = 0
        self._guest: _Guest | None = None
        self._waiting = deque[tuple[bytes, Knock]]()
        self._opening: DataPlane | None = None
        self._stop, self._closing = threading.Event(), ProgressClock()
        rehearse_flags(self._homes.here, settings.exchange.transfer_timeout_s)
        self._heartbeat = HeartbeatClient(run_dir.heartbeat_socket, settings.exchange, self._end)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set.

        Status requests are answered where the run directory's inference rank would answer them.
        Raises `CacheRankError` if another live process does.
        """
        if self._homes.are_on_gpu:
            torch.cuda.set_device(self._homes.here)  # of this thread
        self._stop = stop
        threading.Thread(target=self._abort_once_it_stops, name="stop", daemon=True).start()
        server = StatusServer(self._run_dir.inference_socket, status=self.status)
        try:
            while not stop.is_set():
                received = self._waiting.popleft() if self._waiting else self._door.receive(_POLL_S)
                if received is not None:
                    self._handle(*received)
                self._tend()
        finally:
            self._close_epoch(_STOPS)
            self._door.close()
            self._kept.close()
            self._books.close()
            server.close()

    def status(self) -> StatusReply:
        """Return how long an epoch has been ending, which alone has no limit.

        Safe from any thread.
        """
        guest = self._guest
        return StatusReply(
            role="pump",
            epoch=0 if guest is None else guest.welcome.epoch,
            ready=True,
            values={"stalled_s": self._closing.stalled_s()},
            info={},
        )

    def _handle(self, peer: bytes, letter: Letter) -> None:
        guest = self._guest
        if isinstance(letter, Knock):
            self._admit(peer, letter)
            return
        if guest is None or guest.peer != peer:
            _LOG.info("ignored %s of an epoch that is over", type(letter).__name__)
            return
        guest.patience.hear()
        match letter:
            case Meet() if guest.session is None:
                self._open(guest, letter)
            case Heartbeat():
                guest.patience = Pulse(self._settings.exchange)
                self._door.send(peer, HeartbeatReply(letter.epoch, letter.sequence, busy_s=0.0))
            case Ended():
                self._close_epoch(letter.reason)
            case _:
                self._close_epoch(f"{type(letter).__name__} is not what comes now")

    def _tend(self) -> None:
        guest = self._guest
        if guest is None:
            return
        session = guest.session
        if guest.patience.is_over():
            self._close_epoch("no heartbeat from the inference rank's host")
        elif session is not None and has_hung_up(session.connection):
            self._close_epoch("the cache rank's process ended, or gave the epoch up; see its log")
        elif session is not None and session.is_over():
            self._close_epoch(session.reason)

    def _admit(self, peer: bytes, knock: Knock) -> None:
        if knock.protocol_version != PROTOCOL_VERSION:
            self._door.send(peer, refuse_version(knock.protocol_version))
            return
        if knock.rank != self._rank:
            text = (
                f"cache rank {self._rank} is at this address, and {knock.rank} was asked for; name "
                "the addresses in the order of --rank"
            )
            _LOG.warning("refused: %s", text)
            self._door.send(peer, Refused(field="rank", message=text))
            return
        gpus = gpu_uuids(self._homes)
        reason = same_gpu(knock.hello.gpus, gpus)
        if reason is not None:
            self._door.send(peer, Refused(field="gpus", message=reason))
            return
        # It may have waited for long: who gave up must not end another's epoch.
        if not still_waits(self._door.send, peer):
            _LOG.info("ignored the Knock of an inference rank's host that is gone")
            return
        if self._guest is not None and self._guest.session is None:
            self._close_epoch(REPLACED)  # the cache rank waits for its memory, and answers nobody
        control: ControlClient | None = None
        try:
            hello = msgspec.structs.replace(knock.hello, token=self._run_dir.token, gpus=gpus)
            control = ControlClient(self._run_dir)
            welcome = open_epoch(control, hello, _TIMEOUT_S, self._hear)
        except Exception as error:  # whatever it is, another epoch may be sound
            if control is not None:
                control.close()
            _LOG.warning("refused: %s", error, exc_info=True)
            self._door.send(peer, refusal_for(error))
            return
        self._close_epoch(REPLACED)  # not before: who is refused ends nothing
        self._guest = _Guest(peer, hello, welcome, control, Patience(_SILENT_S))
        if not self._door.send(peer, Admitted(welcome)):
            self._close_epoch("who asked for it is gone")

    def _hear(self) -> None:
        """Answer the guest while the cache rank is asked about another; who knocks has to wait."""
        while (received := self._door.receive(0.0)) is not None:
            peer, letter = received
            if not isinstance(letter, Knock):
                self._handle(peer, letter)
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting.append((peer, letter))
            else:
                _LOG.warning("ignored Knock: %d others wait", _MAX_WAITING)

    def _open(self, guest: _Guest, meet: Meet) -> None:
        def tell(place: bytes, _: tuple[bytes, ...]) -> bytes:
            self._door.send(guest.peer, Met(guest.welcome.epoch, place))
            return meet.place

        try:
            # While the other host waits to be met: it knows how long memory may take (`opening_s`).
            specs = self._have_memory(guest, meet)
            plane, wires = meet_host(
                CACHE_END, self._homes.here, self._door.address.host, self._settings, _TIMEOUT_S,
                meet.token, tell, meet.wires,
            )  # fmt: skip
            self._opening = plane
            try:
                if self._stop.is_set():  # before it could be aborted
                    raise CacheRankLostError(_STOPS)
                guest.session = self._begin(guest, meet, specs, plane, wires)
            except BaseException:
                plane.close()
                raise
            finally:
                self._opening = None
            self._heartbeat.start(guest.welcome.epoch)
        except Exception as error:
            _LOG.warning("epoch %d does not open", guest.welcome.epoch, exc_info=True)
            self._close_epoch(refusal_for(error).message)
            return
        guest.patience.hear()
        self._door.send(guest.peer, Opened(guest.welcome.epoch, self._memory))
        _LOG.info("epoch %d", guest.welcome.epoch)

    def _begin(
        self, guest: _Guest, meet: Meet, specs: RegionSpecs, plane: DataPlane, wires: Wires
    ) -> PumpSession:
        """Give the cache rank memory for the epoch, and start the threads."""
        epoch, ours = guest.welcome.epoch, MappedTensors(self._homes)
        try:
            ours.allocate_all(specs.epoch)
            self._fill_memory(guest, meet, plane)
            connection, books = offer_tensors(
                self._run_dir.memory_socket,
                (self._kept, self._books, ours),
                token=self._run_dir.token,
                epoch=epoch,
                timeout_s=max(_TIMEOUT_S, self._settings.exchange.transfer_timeout_s),
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, HandshakeRefusedError) and error.field == BOOKS:
                _LOG.warning("rows are seeded anew, what is known of them is of no use: %s", error)
                self._books.close()  # the next epoch begins without
            raise
        self._books.close()
        self._books = books
        session = PumpSession(epoch, plane, connection, (ours,))
        try:
            view = MappedTensors(self._homes)
            view.borrow(self._kept, ours)
            hello, traits = guest.hello, guest.welcome.traits
            program = EngineProgram(hello.model, self._settings, traits, page_size=hello.page_size)
            side = Side(view, program, self._settings.selection, session.is_over)
            self._start(session, side, wires)
        except BaseException:
            session.close()
            raise
        return session

    def _start(self, session: PumpSession, side: Side, wires: Wires) -> None:
        plane, announced, out = session.plane, Announced(), Outbox(session.plane)
        received, sent = Contents(side), Contents(side, self._books.get("resident_positions"))
        limit_s = self._settings.exchange.transfer_timeout_s
        lanes = make_lanes(side, sent, received, out, wires, limit_s)
        session.start(
            lanes,
            FarReceiver(side, received.plan, plane, lanes.receives, announced).run,
            FarSender(side, sent, out, lanes.sends, announced).run,
        )

    def _have_memory(self, guest: _Guest, meet: Meet) -> RegionSpecs:
        """Have what survives the cache rank, and return what there is to be of all lives."""
        hello = guest.hello
        sizes = RegionSizes(
            num_slots=guest.welcome.num_slots,
            num_rows=hello.max_rows + 1,
            page_size=hello.page_size,
            is_apart=True,
        )
        specs = specs_by_life(
            hello.model, self._settings.selection, sizes, on_gpu=self._homes.are_on_gpu
        )
        check_told(meet.tensors, most_told(hello.model, self._settings))
        self._keep((*specs.kept, *specs.own), meet.tensors)
        return specs

    def _fill_memory(self, guest: _Guest, meet: Meet, plane: DataPlane) -> None:
        """Receive what both ends hold, and empty what a new inference rank begins with."""
        hello, on_gpu = guest.hello, self._homes.are_on_gpu
        self._receive_tensors(meet, plane)
        if meet.is_new:  # the K/V are of no use to who had them, should that one come back
            self._memory = _new_name()
            if STAMPS in self._books:
                self._books[STAMPS].zero_()
            for spec in flag_specs(hello.model.num_layers, hello.max_rows) if on_gpu else ():
                self._kept[spec.name].zero_()  # its steps are counted anew
        if on_gpu:
            torch.cuda.synchronize(self._homes.here)

    def _keep(self, specs: tuple[TensorSpec, ...], told: tuple[TensorSpec, ...]) -> None:
        """Have the memory that survives the cache rank, other sizes begin anew; and `told`."""
        for spec in self._kept.specs:
            if spec.name.startswith(PREDICTOR_PREFIX):
                self._kept.forget(spec.name)
        if list(self._kept.specs) != list(specs):
            self._kept.close()
            self._books.close()
            self._kept.allocate_all(specs)
            self._memory = _new_name()
        self._kept.allocate_all(told)

    def _receive_tensors(self, meet: Meet, plane: DataPlane) -> None:
        while True:
            for record in read_records(plane.receive(self._settings.exchange.transfer_timeout_s)):
                if record.op is Op.END:
                    return
                if record.op is not Op.TENSOR or not 0 <= record.a < len(meet.tensors):
                    raise ProtocolError(f"{record.op.name} came before the tensors")
                whole = self._kept[meet.tensors[record.a].name].view(-1).view(torch.uint8)
                whole[record.b : record.b + len(record.content)] = record.content

    def _abort_once_it_stops(self) -> None:
        """End a wait for what is sent before an epoch: no other thread of it is there yet."""
        self._stop.wait()
        plane = self._opening
        if plane is not None:
            plane.abort(_STOPS)

    def _end(self, reason: str) -> None:
        guest = self._guest
        if guest is not None and guest.session is not None:
            guest.session.end(reason)

    def _close_epoch(self, reason: str) -> None:
        guest, self._guest = self._guest, None
        if guest is None:
            return
        _LOG.info("epoch %d ends: %s", guest.welcome.epoch, reason)
        self._heartbeat.stop()
        self._door.send(guest.peer, Ended(guest.welcome.epoch, reason[:MAX_TEXT]))
        try:
            guest.control.send(Goodbye(epoch=guest.welcome.epoch))
        except TandemKVError as error:
            _LOG.info("the cache rank was not told: %s", error)
        guest.control.close()
        if guest.session is not None:
            self._closing.advance()
            guest.session.close()
            self._closing.idle()
        else:  # it was welcomed: the next one would find the cache rank waiting for memory
            withdraw_tensors(
                self._run_dir.memory_socket,
                token=self._run_dir.token,
                epoch=guest.welcome.epoch,
                reason=reason,
            )


def _new_name() -> int:
    """Return what no memory was called yet; 0 is none."""
    return secrets.randbits(61) + 1


def check_told(told: Sequence[TensorSpec], most_bytes: int) -> None:
    """Refuse what an inference rank wants held besides what both ends derive.

    Raises `ProtocolError` if it is something else than weights of the prediction, or more than
    `most_bytes` in all.
    """
    for each in told:
        if not each.name.startswith(PREDICTOR_PREFIX):
            raise ProtocolError(f"tensor {each.name!r} is none of ours")
    nbytes = sum(spec.nbytes for spec in told)
    if nbytes > most_bytes:
        raise ProtocolError(
            f"the inference rank wants {nbytes} bytes held for the prediction of queries; those of "
            f"this model take {most_bytes} at most"
        )
