# SPDX-License-Identifier: Apache-2.0
"""Who is let in between two hosts, and what is said to others."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from tandemkv.cache_rank.protocol.errors import (
    CacheRankError,
    CacheRankLostError,
    HandshakeRefusedError,
    SettingsError,
)
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.message.data_plane import (
    CACHE_END,
    INFERENCE_END,
    TOKEN_BYTES,
    DataPlane,
    MeetingPoint,
)
from tandemkv.cache_rank.protocol.message.door import Caller, Door, await_entry
from tandemkv.cache_rank.protocol.message.keys import (
    CACHE_RANK,
    INFERENCE_RANK,
    allowed_keys,
    make_keys,
    own_keys,
    public_key,
)
from tandemkv.cache_rank.protocol.message.letters import Ended, Letter, Meet, Met
from tandemkv.cache_rank.protocol.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    HeartbeatReply,
    Refused,
)

pytestmark = pytest.mark.timeout(60)
_ANYWHERE = LinkAddress("127.0.0.1", 0)


def _answer(letter: Letter) -> Letter:
    assert isinstance(letter, Heartbeat)
    return HeartbeatReply(epoch=letter.epoch, sequence=letter.sequence, busy_s=0.0)


@contextmanager
def _serving(
    folder: Path,
    answer: Callable[[Letter], Letter] = _answer,
    hosts: tuple[str, ...] = (),
    address: LinkAddress = _ANYWHERE,
) -> Iterator[Door]:
    door = Door(address, own_keys(folder, CACHE_RANK), allowed_keys(folder), hosts)
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            received = door.receive(0.05)
            if received is not None:
                door.send(received[0], answer(received[1]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield door
    finally:
        stopping.set()
        thread.join()
        door.close()


@contextmanager
def _calling(door: Door, folder: Path, server: bytes | None = None) -> Iterator[Caller]:
    caller = Caller(
        door.address,
        own_keys(folder, INFERENCE_RANK),
        public_key(folder, CACHE_RANK) if server is None else server,
    )
    try:
        yield caller
    finally:
        caller.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    assert len(make_keys(folder)) == 4
    return folder


def _asks(caller: Caller, sequence: int = 1) -> Letter:
    return caller.request(Heartbeat(epoch=3, sequence=sequence), 5.0)


def test_who_has_the_keys_is_answered(keys: Path) -> None:
    with _serving(keys) as door, _calling(door, keys) as caller:
        for sequence in (1, 2):
            reply = HeartbeatReply(epoch=3, sequence=sequence, busy_s=0.0)
            assert _asks(caller, sequence) == reply


@pytest.mark.parametrize("says_why", [False, True])
def test_who_ends_while_it_is_asked_is_not_waited_for(keys: Path, *, says_why: bool) -> None:
    """zmq connects to the next one by itself, which has not got the question."""
    door = Door(_ANYWHERE, own_keys(keys, CACHE_RANK), allowed_keys(keys))
    with _calling(door, keys) as caller, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(caller.request, Heartbeat(epoch=3, sequence=1), 20.0)
        while (received := door.receive(0.05)) is None:
            pass
        ended = Ended(epoch=3, reason="the cache rank's host stops")
        if says_why:
            door.send(received[0], ended)
        door.close()
        with _serving(keys, address=door.address):
            if says_why:
                assert asked.result(5.0) == ended
            else:
                with pytest.raises(CacheRankLostError, match="has hung up"):
                    asked.result(5.0)


def test_a_key_that_is_not_on_the_allow_list(keys: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    make_keys(stranger)
    server = public_key(keys, CACHE_RANK)
    with _serving(keys) as door, _calling(door, keys) as known:
        with (
            _calling(door, stranger, server) as caller,
            pytest.raises(HandshakeRefusedError, match=r"not on its allow-list; copy"),
        ):
            _asks(caller)
        assert isinstance(_asks(known), HeartbeatReply)  # nothing was disturbed


def test_an_address_that_is_not_on_the_allow_list(keys: Path) -> None:
    with (
        _serving(keys, hosts=("192.0.2.7",)) as door,
        _calling(door, keys) as caller,
        pytest.raises(HandshakeRefusedError, match="our address is not on its allow-list"),
    ):
        _asks(caller)
    with _serving(keys, hosts=("127.0.0.1",)) as door, _calling(door, keys) as caller:
        assert isinstance(_asks(caller), HeartbeatReply)


def test_the_key_of_another_cache_rank(keys: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_keys(other)
    with (
        _serving(keys) as door,
        _calling(door, keys, public_key(other, CACHE_RANK)) as caller,
        pytest.raises(CacheRankLostError, match="not the cache rank whose key"),
    ):
        caller.request(Heartbeat(epoch=1, sequence=1), 1.0)


def test_nobody_listens(keys: Path) -> None:
    with _serving(keys) as door:
        pass
    with _calling(door, keys) as caller, pytest.raises(CacheRankLostError, match="nobody listens"):
        caller.request(Heartbeat(epoch=1, sequence=1), 0.5)


def _knows_no_name(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "unknown")


def test_the_inference_rank_may_come_first(
    keys: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _serving(keys) as door:
        address, server = door.address, public_key(keys, CACHE_RANK)
    own, stop = own_keys(keys, INFERENCE_RANK), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_entry, address, own, server, stop)
        while "nobody listens there" not in caplog.text:
            assert not waiting.done()
            time.sleep(0.05)
        with _serving(keys, address=address):
            waiting.result(20.0)
        monkeypatch.setattr(socket, "getaddrinfo", _knows_no_name)
        waiting = pool.submit(await_entry, LinkAddress("nobody", 1), own, server, stop)
        while "nobody:1: the name leads to no address (unknown)" not in caplog.text:
            assert not waiting.done()
            time.sleep(0.05)
        stop.set()
        waiting.result(20.0)
        monkeypatch.undo()
    stranger = tmp_path / "stranger"
    make_keys(stranger)
    with _serving(keys) as door, pytest.raises(HandshakeRefusedError, match="not on its allow"):
        await_entry(door.address, own_keys(stranger, INFERENCE_RANK), server, threading.Event())


def test_plain_and_random_bytes_disturb_nothing(keys: Path) -> None:
    with _serving(keys) as door, _calling(door, keys) as caller:
        assert isinstance(_asks(caller), HeartbeatReply)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)):
            with socket.create_connection((door.address.host, door.address.port)) as stranger:
                stranger.sendall(data)
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(str(door.address))
            plain.send(b"hello")
            assert not plain.poll(300)
        assert isinstance(_asks(caller, 2), HeartbeatReply)
        assert door.malformed == 0  # nothing of it was decoded


def test_another_version_is_refused(keys: Path) -> None:
    with _serving(keys) as door, _calling(door, keys) as caller:
        # A later version's Knock: the first field is the version, the rest is anything.
        caller._socket.send(msgspec.msgpack.encode([21, PROTOCOL_VERSION + 1, "new", 5]))
        reply = caller.receive(5.0)
    assert isinstance(reply, Refused)
    assert reply.field == "protocol_version"
    assert f"inference rank has {PROTOCOL_VERSION + 1}" in reply.message


def test_the_data_plane_opens_behind_the_door(keys: Path) -> None:
    planes: list[DataPlane] = []
    threads: list[threading.Thread] = []

    def answer(letter: Letter) -> Letter:
        assert isinstance(letter, Meet)
        point = MeetingPoint("127.0.0.3", CACHE_END, timeout_s=10, transfer_timeout_s=5)
        threads.append(
            threading.Thread(target=lambda: planes.append(point.meet(letter.place, letter.token)))
        )
        threads[0].start()
        return Met(epoch=letter.epoch, place=point.place)

    token = os.urandom(TOKEN_BYTES)
    with _serving(keys, answer) as door, _calling(door, keys) as caller:
        point = MeetingPoint("127.0.0.2", INFERENCE_END, timeout_s=10, transfer_timeout_s=5)
        met = caller.request(Meet(epoch=4, place=point.place, token=token), 5.0)
        assert isinstance(met, Met)
        ours = point.meet(met.place, token)
        threads[0].join()
    sent = threading.Thread(
        target=planes[0].send, args=(torch.frombuffer(bytearray(b"packed"), dtype=torch.uint8),)
    )
    sent.start()
    assert bytes(ours.receive().tolist()) == b"packed"
    sent.join()


def test_a_taken_or_foreign_address_is_told(keys: Path) -> None:
    own, allowed = own_keys(keys, CACHE_RANK), allowed_keys(keys)
    with _serving(keys) as door, pytest.raises(CacheRankError, match="cannot be bound"):
        Door(door.address, own, allowed)
    with pytest.raises(CacheRankError, match="must be one of this machine's"):
        Door(LinkAddress("192.0.2.1", 0), own, allowed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:5", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "tcp://HOST:PORT"),
        ("tcp://0.0.0.0:5", "every interface"),
        ("tcp://[::]:5", "every interface"),
        ("tcp://[::ffff:0.0.0.0]:5", "every interface"),
        ("tcp://[::ffff:0:0]:5", "every interface"),
        ("tcp://example.org:5", "IP address"),
    ],
)
def test_addresses_that_are_none(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        LinkAddress.parse(text)


def test_addresses() -> None:
    for text in ("tcp://127.0.0.1:5", "tcp://[::1]:65535"):
        assert str(LinkAddress.parse(text)) == text
        peer = LinkAddress.parse_peer(text)
        assert peer.resolved() == peer == LinkAddress.parse(text)
    assert str(LinkAddress.parse("tcp://::1:5")) == "tcp://[::1]:5", "as $(POD_IP) is put in"


def test_the_other_end_may_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = LinkAddress.parse_peer("tcp://cache-rank-0.cache-rank.ns.svc:7400")
    assert str(peer) == "tcp://cache-rank-0.cache-rank.ns.svc:7400"
    for number in (1, 2):  # it is asked each time
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"192.0.2.{number}", 7400))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=answer, **__: found)
        assert str(peer.resolved()) == f"tcp://192.0.2.{number}:7400"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        hosts = ("127.0.0.2", "127.0.0.1")  # of two families, say; at the first nobody listens
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        peer = LinkAddress.parse_peer(f"tcp://both:{port}")
        assert str(peer.resolved()) == f"tcp://127.0.0.1:{port}"
    assert str(peer.resolved()) == f"tcp://127.0.0.2:{port}"
    for host in ("0.0.0.0", "a b", "", "-a", "a..b", "a" * 64, "300.1.1.1"):
        with pytest.raises(SettingsError):
            LinkAddress.parse_peer(f"tcp://{host}:5")


def test_keys_are_kept_private_and_not_shown(keys: Path) -> None:
    assert make_keys(keys) == ()
    pair = own_keys(keys, CACHE_RANK)
    assert pair.secret.decode() not in repr(pair)
    secret = keys / "cache_rank.key_secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        own_keys(keys, CACHE_RANK)


def test_a_public_key_that_was_moved_away_is_made_again(keys: Path) -> None:
    kept = {path.name: path.read_bytes() for path in keys.iterdir()}
    public = keys / f"{INFERENCE_RANK}.key"
    public.unlink()
    assert make_keys(keys) == (public,)
    assert public_key(keys, INFERENCE_RANK) == own_keys(keys, INFERENCE_RANK).public
    assert b"secret-key" not in public.read_bytes()
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    kept.pop(public.name)
    assert all((keys / name).read_bytes() == content for name, content in kept.items())
    (keys / f"{INFERENCE_RANK}.key_secret").unlink()
    assert make_keys(keys) == (), "which is on the other host"


@pytest.mark.parametrize("line", ["public-key", "secret-key"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_damaged_keys_are_told(keys: Path, line: str, *, is_cut: bool) -> None:
    def damage(name: str) -> None:
        before, mark, after = (keys / name).read_text().partition(f'{line} = "')
        first = "" if is_cut else "0" if after[0] != "0" else "1"
        (keys / name).write_text(before + mark + first + after[1:])

    damage("cache_rank.key_secret")
    with pytest.raises(SettingsError, match="key_secret: a key in it is damaged"):
        own_keys(keys, CACHE_RANK)
    if is_cut and line == "public-key":  # one that came alone goes with none
        damage("inference_rank.key")
        with pytest.raises(SettingsError, match="key: a key in it is damaged"):
            public_key(keys, INFERENCE_RANK)
        with pytest.raises(SettingsError, match="key: a key in it is damaged"):
            allowed_keys(keys)


def test_missing_keys_are_told(keys: Path) -> None:
    (keys / "inference_rank.key").unlink()
    with pytest.raises(SettingsError, match="nobody may connect"):
        allowed_keys(keys)
    with pytest.raises(SettingsError, match="no CURVE key"):
        public_key(keys, INFERENCE_RANK)
