# SPDX-License-Identifier: Apache-2.0
"""The control sockets: order, bounds, strangers, and who may bind."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tandemkv.cache_rank.protocol.control import ControlClient, ControlServer
from tandemkv.cache_rank.protocol.errors import CacheRankError, CacheRankLostError, ProtocolError
from tandemkv.cache_rank.protocol.messages import (
    MAX_FRAME_BYTES,
    Goodbye,
    StatusReply,
    StatusRequest,
    encode,
)
from tandemkv.cache_rank.protocol.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def server(run_dir: RunDir) -> Iterator[ControlServer]:
    server = ControlServer(run_dir)
    yield server
    server.close()


@pytest.fixture
def client(run_dir: RunDir) -> Iterator[ControlClient]:
    client = ControlClient(run_dir)
    yield client
    client.close()


@pytest.fixture
def stranger(run_dir: RunDir) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{run_dir.control_socket}")
    yield raw
    raw.close(linger=0)
    context.term()


def test_messages_arrive_in_order(server: ControlServer, client: ControlClient) -> None:
    for epoch in range(500):
        client.send(Goodbye(epoch=epoch))
    got = [server.poll(2.0) for _ in range(500)]
    assert [m[1] for m in got if m] == [Goodbye(epoch=e) for e in range(500)]
    assert server.poll(0.0) is None


def test_answer_reaches_the_one_who_asked(server: ControlServer, run_dir: RunDir) -> None:
    clients = [ControlClient(run_dir) for _ in range(2)]
    peers = []
    for n, each in enumerate(clients):
        each.send(Goodbye(epoch=n))
        received = server.poll(2.0)
        assert received is not None
        peers.append(received[0])
    for n in (1, 0):
        assert server.send(peers[n], Goodbye(epoch=n))
        assert clients[n].request(StatusRequest(), 2.0) == Goodbye(epoch=n)
    for each in clients:
        each.close()


def test_send_to_one_who_is_gone_is_false(server: ControlServer, client: ControlClient) -> None:
    assert not server.send(b"nobody", Goodbye(epoch=1))
    client.send(Goodbye(epoch=1))
    received = server.poll(2.0)
    assert received is not None
    client.close()
    deadline = time.monotonic() + 2.0
    while server.send(received[0], Goodbye(epoch=1)) and time.monotonic() < deadline:
        server.poll(0.01)
    assert not server.send(received[0], Goodbye(epoch=1))


def test_last_words_before_close_arrive(server: ControlServer, run_dir: RunDir) -> None:
    client = ControlClient(run_dir)
    client.send(Goodbye(epoch=4))
    client.close()
    received = server.poll(2.0)
    assert received is not None
    assert received[1] == Goodbye(epoch=4)


def test_garbage_is_counted_and_good_messages_go_on(
    server: ControlServer, client: ControlClient, stranger: zmq.Socket[bytes]
) -> None:
    rng = random.Random(1)
    for _ in range(300):
        stranger.send(rng.randbytes(rng.randint(0, 200)))
    stranger.send_multipart([encode(Goodbye(epoch=1))] * 2)
    stranger.send_multipart([b"x" * 1000] * 50)
    stranger.send(encode(Goodbye(epoch=1)) + b"x")
    deadline = time.monotonic() + 5.0
    while server.malformed < 303 and time.monotonic() < deadline:
        assert server.poll(0.1) is None
    assert server.malformed == 303
    client.send(Goodbye(epoch=2))
    received = server.poll(2.0)
    assert received is not None
    assert received[1] == Goodbye(epoch=2)


def test_garbage_without_end_holds_nobody_up(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are done between two looks at the socket."""
    begun = time.monotonic()

    def garbage(*_: object, **__: object) -> tuple[list[bytes], bool]:
        assert time.monotonic() < begun + 1, "it does not end"
        return [b"somebody", b"\xc1"], True

    monkeypatch.setattr("tandemkv.cache_rank.protocol.ipc.readable", lambda *_: True)
    monkeypatch.setattr("tandemkv.cache_rank.protocol.ipc.receive_parts", garbage)
    assert server.poll(0.0) is None
    assert server.malformed


def test_frame_beyond_the_limit_ends_its_connection_only(
    server: ControlServer, client: ControlClient, stranger: zmq.Socket[bytes]
) -> None:
    stranger.send(b"x" * (MAX_FRAME_BYTES + 1))
    assert server.poll(0.3) is None
    client.send(Goodbye(epoch=2))
    assert server.poll(2.0) is not None


_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL".ljust(64, b"\x00")
"""Of ZMTP 3, so that what follows is taken for commands."""


def _send_raw(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        for _ in range(500):
            try:
                raw.connect(str(path))
                break
            except BlockingIOError:  # its queue of connections is full
                time.sleep(0.01)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(data)


_CLOSE_UNDER_FIRE = """
import sys
from tandemkv.cache_rank.protocol.control import ControlServer
from tandemkv.cache_rank.protocol.run_dir import RunDir
run_dir = RunDir.open(sys.argv[1])
for _ in range(200):
    server = ControlServer(run_dir)
    server.poll(0.002)
    server.close()
"""


def test_closing_under_raw_bytes_does_not_end_the_process(run_dir: RunDir) -> None:
    """As libzmq 4.3.5 does when a peer that speaks ZMTP 1 greets a socket that closes."""
    child = subprocess.Popen([sys.executable, "-P", "-c", _CLOSE_UNDER_FIRE, str(run_dir.path)])
    rng = random.Random(3)
    while child.poll() is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(run_dir.control_socket))
            raw.sendall(rng.choice((b"", _GREETING)) + rng.randbytes(300))
    assert child.returncode == 0


_LEFT_OPEN = """
import gc, sys
from tandemkv.cache_rank.protocol.control import ControlClient, ControlServer
from tandemkv.cache_rank.protocol.run_dir import RunDir
run_dir = RunDir.open(sys.argv[1])
held = {"server": ControlServer(run_dir), "client": ControlClient(run_dir)}
held["itself"] = held
del held
gc.collect()
"""


def test_sockets_that_were_left_open_are_collected_without_a_wait(run_dir: RunDir) -> None:
    command = [sys.executable, "-P", "-c", _LEFT_OPEN, str(run_dir.path)]
    subprocess.run(command, check=True, timeout=60)


def test_raw_bytes_on_the_socket_do_no_harm(
    server: ControlServer, client: ControlClient, run_dir: RunDir
) -> None:
    rng = random.Random(2)
    for n in range(100):
        _send_raw(run_dir.control_socket, (_GREETING if n % 2 else b"") + rng.randbytes(300))
    client.send(Goodbye(epoch=2))
    received = server.poll(2.0)
    assert received is not None
    assert received[1] == Goodbye(epoch=2)


def test_send_does_not_block_when_nobody_reads(client: ControlClient) -> None:
    def flood() -> None:
        for epoch in range(100_000):
            client.send(Goodbye(epoch=epoch))

    start = time.monotonic()
    with pytest.raises(CacheRankLostError, match="nobody reads"):
        flood()
    assert time.monotonic() - start < 2.0


def test_message_beyond_the_limit_is_the_senders_error(client: ControlClient) -> None:
    large = StatusReply(role="x", epoch=1, ready=True, values={}, info={"x": "y" * MAX_FRAME_BYTES})
    with pytest.raises(ProtocolError, match="exceeds"):
        client.send(large)


def test_request_times_out(server: ControlServer, client: ControlClient) -> None:
    start = time.monotonic()
    with pytest.raises(CacheRankLostError, match="StatusRequest"):
        client.request(StatusRequest(), 0.1)
    assert time.monotonic() - start < 0.5


def test_socket_is_private_and_removed(run_dir: RunDir) -> None:
    server = ControlServer(run_dir)
    assert stat.S_IMODE(run_dir.control_socket.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not run_dir.control_socket.exists()
    ControlServer(run_dir).close()


def test_second_server_is_refused_and_harms_nothing(
    server: ControlServer, client: ControlClient, run_dir: RunDir
) -> None:
    with pytest.raises(CacheRankError, match="another live process"):
        ControlServer(run_dir)
    client.send(Goodbye(epoch=1))
    assert server.poll(2.0) is not None


_HOLD = """
import sys, time
from tandemkv.cache_rank.protocol.control import ControlServer
from tandemkv.cache_rank.protocol.run_dir import RunDir
server = ControlServer(RunDir.open(sys.argv[1]))
print("bound", flush=True)
time.sleep(60)
"""


def test_a_server_that_gets_no_socket_says_so_and_keeps_no_lock(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack_descriptors() -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("tandemkv.cache_rank.protocol.ipc._require_descriptors", lack_descriptors)
    with pytest.raises(CacheRankError, match=r"no socket can be made: Too many open files.*ulimit"):
        ControlServer(run_dir)
    monkeypatch.undo()
    ControlServer(run_dir).close()


def test_socket_of_a_dead_process_is_taken_over(run_dir: RunDir) -> None:
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _HOLD, str(run_dir.path)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"bound\n"
    with pytest.raises(CacheRankError, match="another live process"):
        ControlServer(run_dir)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert run_dir.control_socket.exists()
    client = ControlClient(run_dir)
    client.send(Goodbye(epoch=1))
    server = ControlServer(run_dir)
    assert server.poll(3.0) is not None
    client.close()
    server.close()
