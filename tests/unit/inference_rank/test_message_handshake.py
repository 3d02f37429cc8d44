# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: an epoch that does not open, or takes long to, ends nothing but itself."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from message_pumps import FarForward, Pumps, check_same, far_played
from shared_forward import Forward, settings_of
from stream_forward import engine_of
from tiny_model import write_model

from tandemkv.cache_rank.protocol import ipc
from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.errors import (
    CacheRankError,
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
)
from tandemkv.cache_rank.protocol.handshake import open_epoch
from tandemkv.cache_rank.protocol.ipc import IpcRouter, server_pid
from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.message import opening
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.message.door import Caller
from tandemkv.cache_rank.protocol.message.keys import (
    CACHE_RANK,
    INFERENCE_RANK,
    make_keys,
    own_keys,
    public_key,
)
from tandemkv.cache_rank.protocol.message.letters import Knock, Meet
from tandemkv.cache_rank.protocol.messages import PROTOCOL_VERSION, Welcome
from tandemkv.cache_rank.protocol.models.predictor_weights import PREDICTOR_PREFIX
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.pump import far_service, near_service
from tandemkv.cache_rank.pump.far_service import FarPump
from tandemkv.cache_rank.pump.near_service import NearPump
from tandemkv.cache_rank.pump.session import PumpSession
from tandemkv.cache_rank.service import service
from tandemkv.cache_rank.service.service import SharedEngineService
from tandemkv.inference_rank.links import connection

pytestmark = pytest.mark.timeout(120)
_SETTINGS = settings_of(
    "last_query", {"link": "message", "two_gpus": True}, index_dtype="int8", sample_tokens=8
)


def _leave(played: Forward) -> None:
    """End the epoch, so that another one can be opened."""
    played.connection.leave("a test")
    played.link.rewind()


def test_why_the_other_host_does_not_meet_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ProtocolError("the GPUs are of another kind")

    with far_played(tmp_path, _SETTINGS) as (played, _):
        _leave(played)
        with monkeypatch.context() as patched:
            patched.setattr(far_service, "meet_host", fail)
            with pytest.raises(HandshakeRefusedError) as refused:
                played.connection.open_connection(timeout_s=15)
        told = "handshake refused, field=memory: the GPUs are of another kind"
        assert str(refused.value) == told
        played.connection.open_connection(timeout_s=30).close()


def test_the_time_to_have_memory_follows_its_bytes() -> None:
    """At the rates that docs/hosts.md states."""
    weights = TensorSpec(PREDICTOR_PREFIX + "weight", (36, 4096, 4096), "bfloat16", "host")
    pool = TensorSpec("kv", (36, 2, 100_000, 8, 128), "bfloat16", "host")
    assert opening.opening_s([weights]) == pytest.approx(36 * 4096 * 4096 * 2 / 50e6)
    assert opening.opening_s([pool], 10**9) == pytest.approx(pool.nbytes / 1e9 + 20.0)


def test_memory_that_takes_longer_than_the_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends of the link wait for it as its size says, and so does the engine."""
    limit_s, keep, taken = 4.0, FarPump._keep, list[float]()

    def keep_slowly(*given: Any) -> None:
        begun = time.monotonic()
        time.sleep(limit_s + 2.0)
        keep(*given)
        taken.append(time.monotonic() - begun)

    monkeypatch.setattr(FarPump, "_keep", keep_slowly)
    monkeypatch.setattr(near_service, "_TIMEOUT_S", limit_s)
    for rate in ("_MADE_PER_S", "_SENT_PER_S"):
        monkeypatch.setattr(opening, rate, 1e5)
    exchange = _SETTINGS.exchange.model_copy(update={"transfer_timeout_s": limit_s})
    settings = _SETTINGS.model_copy(update={"exchange": exchange})
    near, far = RunDir.create(tmp_path / "near"), RunDir.create(tmp_path / "far")
    model_dir = write_model(tmp_path / "model")
    make_keys(tmp_path / "keys")
    with engine_of(far, model_dir, settings, homes=Homes.on_host()):
        pumps = Pumps(near, far, settings, tmp_path / "keys")
        try:
            played = FarForward(near, model_dir, settings)
            _leave(played)
            played.connection.open_connection(timeout_s=limit_s).close()
            played.connection.close()
            played.kept.close()
        finally:
            pumps.close()
    assert min(taken) > limit_s
    assert len(taken) == 2


@pytest.mark.parametrize("is_far", [False, True], ids=["same host", "other host"])
def test_an_engine_that_takes_longer_than_the_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_far: bool
) -> None:
    """Else it would never be met: who gives up makes it build another one, just as slowly."""
    make, limit_s = service.SharedSession, 1.0

    def make_slowly(**given: Any) -> Any:
        time.sleep(2.5 * limit_s)
        return make(**given)

    settings = _SETTINGS if is_far else settings_of("last_query", {"two_gpus": False})
    near, model_dir = RunDir.create(tmp_path / "near"), write_model(tmp_path / "model")
    far = RunDir.create(tmp_path / "far") if is_far else near
    make_keys(tmp_path / "keys")
    with ExitStack() as running:
        running.enter_context(engine_of(far, model_dir, settings, homes=Homes.on_host()))
        if is_far:
            pumps = running.enter_context(closing(Pumps(near, far, settings, tmp_path / "keys")))
        played = (FarForward if is_far else Forward)(near, model_dir, settings)
        running.callback(played.kept.close)
        running.callback(played.connection.close)
        _leave(played)
        for pump in (near_service, far_service):
            monkeypatch.setattr(pump, "_TIMEOUT_S", limit_s)
        monkeypatch.setattr(service, "SharedSession", make_slowly)
        played.connection.open_connection(timeout_s=limit_s).close()
        if is_far:  # and it is waited for no longer than the pump runs
            opening_it = threading.Thread(target=_open_in_vain, args=(played,))
            opening_it.start()
            time.sleep(limit_s)
            stop, thread = pumps._running[1]
            stop.set()
            thread.join(limit_s)
            assert not thread.is_alive()
            opening_it.join()


def _open_in_vain(played: Forward) -> None:
    with pytest.raises((CacheRankLostError, HandshakeRefusedError)):
        played.connection.open_connection(timeout_s=30)


@pytest.mark.parametrize("place", [connection, near_service], ids=["memory", "lanes"])
def test_an_inference_rank_may_take_long_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    """It has its memory to make once it is let in, and its pump has lanes to make."""
    name = "offer_tensors" if place is connection else "make_lanes"
    make, is_made = getattr(place, name), threading.Event()

    def make_slowly(*given: Any, **named: Any) -> Any:
        time.sleep(1.5)  # three heartbeats that stay away are a loss
        is_made.set()
        return make(*given, **named)

    with far_played(tmp_path, _SETTINGS) as (played, _):
        _leave(played)
        monkeypatch.setattr(place, name, make_slowly)
        with closing(played.connection.open_connection(timeout_s=15)) as opened:
            assert is_made.wait(10)
            time.sleep(0.5)
            assert not opened.is_gone


@contextmanager
def _silent_near(played: FarForward) -> Iterator[threading.Event]:
    """Have the inference rank's host fall silent before the tensors; yields when it has met."""
    go_on, is_silent = threading.Event(), threading.Event()

    def fall_silent(*_: object) -> None:
        is_silent.set()
        go_on.wait()
        raise CacheRankLostError("it was silent")

    _leave(played)
    opening_it = threading.Thread(target=_open_in_vain, args=(played,))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NearPump, "_hand_over", fall_silent)
        opening_it.start()
        try:
            assert is_silent.wait(30)
            yield go_on
        finally:
            go_on.set()
            opening_it.join()


def test_a_host_that_falls_silent_before_its_tensors_is_given_up(tmp_path: Path) -> None:
    exchange = _SETTINGS.exchange.model_copy(update={"transfer_timeout_s": 2.0})
    settings = _SETTINGS.model_copy(update={"exchange": exchange})
    with far_played(tmp_path, settings) as (played, _):
        far = played.pumps[0].far
        with _silent_near(played):
            deadline = time.monotonic() + 20
            while far._guest is not None:
                assert time.monotonic() < deadline, "the far end still waits"
                time.sleep(0.05)
        played.connection.open_connection(timeout_s=30).close()


def test_a_pump_that_waits_for_tensors_stops(tmp_path: Path) -> None:
    with far_played(tmp_path, _SETTINGS) as (played, _):
        stop, thread = played.pumps[0]._running[0]
        with _silent_near(played):
            time.sleep(0.5)  # it is in the wait by now; before it, it does not begin one
            stop.set()
            thread.join(15)
            assert not thread.is_alive()


@pytest.mark.parametrize("number", [0, 1], ids=["far", "near"])
def test_a_pump_that_lacks_descriptors_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The far one has all K/V."""
    with far_played(tmp_path, _SETTINGS) as (played, _):
        thread, require = played.pumps[0]._running[number][1], ipc._require_descriptors

        def require_here() -> None:
            if threading.current_thread() is thread:
                raise zmq.ZMQError(errno.EMFILE)
            require()

        _leave(played)
        with monkeypatch.context() as patched:
            patched.setattr(ipc, "_require_descriptors", require_here)
            with pytest.raises(HandshakeRefusedError, match="Too many open files"):
                played.connection.open_connection(timeout_s=15)
        assert thread.is_alive()
        played.connection.open_connection(timeout_s=30).close()


def _ask_slowly(*given: Any) -> Welcome:
    """Ask the engine, as `open_epoch`; three heartbeats that go unanswered are a loss."""
    *_, meanwhile = given
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        meanwhile()
        time.sleep(0.05)
    return open_epoch(*given)


def test_who_is_refused_ends_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a key that is let in, and other settings; the engine takes long to say so."""
    settings = settings_of("last_query", {"link": "message", "two_gpus": True}, sample_tokens=4)
    with far_played(tmp_path, _SETTINGS) as (played, _):
        want, (pumps,) = played.run(), played.pumps
        epoch = pumps.far._guest.welcome.epoch
        near = RunDir.create(tmp_path / "near2")
        other = Pumps(near, pumps._of_far[0], settings, tmp_path / "keys", address=pumps._address)
        monkeypatch.setattr(far_service, "open_epoch", _ask_slowly)
        try:
            with pytest.raises(HandshakeRefusedError, match="sample_tokens"):
                FarForward(near, tmp_path / "model", settings)
        finally:
            other.close()
        assert pumps.far._guest.welcome.epoch == pumps.near.status().epoch == epoch
        check_same(played.run(), want)
        assert played.num_lost == 0


@pytest.mark.parametrize("is_asked", [False, True], ids=["before its turn", "meanwhile"])
def test_a_host_that_gives_up_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_asked: bool
) -> None:
    """Before its turn, as while the pump waits for memory, it ends nothing; no epoch stays open."""
    keys, came, is_gone = tmp_path / "keys", threading.Event(), threading.Event()

    def come_back_late(once: Any, *given: Any) -> Any:
        found = once(*given) if is_asked else None
        came.set()
        assert is_gone.wait(10)
        return found if is_asked else once(*given)

    with far_played(tmp_path, _SETTINGS) as (played, _):
        (pumps,) = played.pumps
        guest = pumps.far._guest
        assert guest is not None
        knock = Knock(PROTOCOL_VERSION, msgspec.structs.replace(guest.hello, token=b""))
        place, name = (far_service, "open_epoch") if is_asked else (FarPump, "_admit")
        once = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given: come_back_late(once, *given))
        caller = Caller(
            pumps._address, own_keys(keys, INFERENCE_RANK), public_key(keys, CACHE_RANK)
        )
        caller.enter(5.0)
        caller.send(knock)
        assert came.wait(10)
        caller.close()
        time.sleep(0.2)  # the other end of it hears of that
        is_gone.set()
        time.sleep(0.3)  # less than the heartbeats of an inference rank may take
        assert pumps.far._guest is (None if is_asked else guest)
        if not is_asked:
            played.run()
            assert played.num_lost == 0


@pytest.mark.parametrize("field", ["gpus", "selection.sample_tokens"])
def test_who_is_refused_on_the_same_host_ends_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """It has the run directory, and another GPU than its pump, or other settings."""
    with far_played(tmp_path, _SETTINGS) as (played, _):
        want, (pumps,) = played.run(), played.pumps
        guest, run_dir = pumps.far._guest, RunDir.open(tmp_path / "near")
        assert guest is not None
        hello = msgspec.structs.replace(guest.hello, token=run_dir.token)
        if field == "gpus":
            hello = msgspec.structs.replace(hello, gpus=("GPU-1",))
        else:
            hello.settings[field] = "4"
        monkeypatch.setattr(far_service, "open_epoch", _ask_slowly)
        refused = pytest.raises(HandshakeRefusedError, match=rf"^handshake[^:]*={field}: [^:]*$")
        with closing(ControlClient(run_dir)) as control, refused:
            open_epoch(control, hello, 10.0)
        check_same(played.run(), want)
        assert pumps.far._guest is guest
        assert played.num_lost == 0


def test_who_was_welcomed_and_is_gone_is_waited_for_no_longer(tmp_path: Path) -> None:
    """It was killed, or had no memory for the epoch; the next one is welcomed at once."""
    with far_played(tmp_path, _SETTINGS) as (played, _):
        guest, run_dir = played.pumps[0].far._guest, RunDir.open(tmp_path / "near")
        assert guest is not None
        hello = msgspec.structs.replace(guest.hello, token=run_dir.token)
        _leave(played)
        for _ in range(2):
            with closing(ControlClient(run_dir)) as control:
                open_epoch(control, hello, 10.0)
        played.connection.open_connection(timeout_s=10).close()


def test_an_epoch_that_is_met_twice_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it the session that it has; a second one would leave that behind."""
    with far_played(tmp_path, _SETTINGS) as (played, _):
        (pumps,) = played.pumps
        guest, tend, told = pumps.far._guest, NearPump._tend, list[Meet]()
        assert guest is not None
        session = guest.session
        assert session is not None

        def meet_again(near: NearPump) -> None:
            if not told and near._caller is not None:
                told.append(Meet(session.epoch, b"nowhere", b"t" * 32))
                near._caller.send(told[0])
            tend(near)

        opened = list[object]()
        monkeypatch.setattr(FarPump, "_open", lambda *given: opened.append(given))
        monkeypatch.setattr(NearPump, "_tend", meet_again)
        deadline = time.monotonic() + 10
        while session.connection.fileno() != -1:
            assert time.monotonic() < deadline, "it goes on"
            time.sleep(0.02)
        assert not opened


@pytest.mark.parametrize("name", ["kv", "req_to_token"])
def test_other_memory_than_was_agreed_on_is_refused(tmp_path: Path, name: str) -> None:
    with far_played(tmp_path, _SETTINGS) as (played, _):
        _leave(played)
        connection, kept = played.connection, played.connection._kept
        connection._kept = MappedTensors()
        try:
            for spec in kept.specs:
                width = 1 if spec.name == name else 0
                shape = (*spec.shape[:-1], spec.shape[-1] + width)
                if spec.name != name or name != "kv":
                    connection._kept.allocate_all([msgspec.structs.replace(spec, shape=shape)])
            with pytest.raises(HandshakeRefusedError, match=f"mapped tensor '{name}'"):
                connection.open_connection(timeout_s=15)
        finally:
            connection._kept.close()
            connection._kept = kept
        connection.open_connection(timeout_s=30).close()


@pytest.mark.parametrize("service", [far_service, near_service])
def test_lanes_that_cannot_be_made_end_the_epoch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Any
) -> None:
    """As where NCCL fails, or a GPU has no memory left; nothing of the epoch stays open."""
    sessions = list[PumpSession]()

    class Noted(PumpSession):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            sessions.append(self)

    def fail(*_: object) -> None:
        raise RuntimeError("NCCL error")

    with far_played(tmp_path, _SETTINGS) as (played, _):
        played.run()  # its pumps have made their lanes by then
        _leave(played)
        with monkeypatch.context() as patched:
            patched.setattr(service, "make_lanes", fail)
            patched.setattr(service, "PumpSession", Noted)
            if service is far_service:
                with pytest.raises(HandshakeRefusedError, match="NCCL error"):
                    played.connection.open_connection(timeout_s=15)
            else:  # it has told of its memory by then, and hangs up
                opened = played.connection.open_connection(timeout_s=15)
                deadline = time.monotonic() + 15
                while not opened.is_gone:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                opened.close()
        (session,) = sessions
        assert session.connection.fileno() == -1
        assert all(not tensors.specs for tensors in session._tensors)
        assert all(thread.is_alive() for _, thread in played.pumps[0]._running)
        played.connection.open_connection(timeout_s=30).close()


def test_an_error_of_any_type_ends_the_opening_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked is told of it, at whichever of its messages it came."""

    def fail(*_: object) -> None:
        raise KeyError("what")

    with far_played(tmp_path, _SETTINGS) as (played, _):
        _leave(played)
        for place, name in (
            (near_service, "Caller"),
            (far_service, "open_epoch"),
            (FarPump, "_have_memory"),
            (NearPump, "_check_tensors"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(place, name, fail)
                with pytest.raises(HandshakeRefusedError, match="KeyError: 'what'"):
                    played.connection.open_connection(timeout_s=15)
            assert all(thread.is_alive() for _, thread in played.pumps[0]._running)
        played.connection.open_connection(timeout_s=30).close()


@pytest.mark.parametrize("is_pump", [False, True], ids=["engine", "pump"])
def test_what_cannot_serve_leaves_nothing_open(tmp_path: Path, *, is_pump: bool) -> None:
    """Its third socket is another's; the others can be served behind it."""
    run_dir, model_dir = RunDir.create(tmp_path / "run"), write_model(tmp_path / "model")
    make_keys(tmp_path / "keys")
    keys = own_keys(tmp_path / "keys", INFERENCE_RANK), public_key(tmp_path / "keys", CACHE_RANK)

    def make() -> object:
        if is_pump:
            return NearPump(run_dir, _SETTINGS, LinkAddress("127.0.0.1", 1), *keys)
        return SharedEngineService(
            run_dir=run_dir, model_dir=model_dir, settings=_SETTINGS, max_rows=3,
            homes=Homes.on_host(),
        )  # fmt: skip

    other = IpcRouter(run_dir.heartbeat_socket)
    try:
        with pytest.raises(CacheRankError, match="another live process serves it"):
            make()
    finally:
        other.close()
    assert not run_dir.memory_socket.exists()
    assert server_pid(run_dir.control_socket) is None
