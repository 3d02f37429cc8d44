# SPDX-License-Identifier: Apache-2.0
"""Loss is noticed in time, once, and only when it is one."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tandemkv.cache_rank.protocol import heartbeat
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.heartbeat import (
    HeartbeatClient,
    HeartbeatServer,
    StatusServer,
    request_status,
)
from tandemkv.cache_rank.protocol.ipc import IpcDealer, IpcRouter
from tandemkv.cache_rank.protocol.messages import (
    Heartbeat,
    HeartbeatReply,
    StatusReply,
    StatusRequest,
)
from tandemkv.cache_rank.protocol.settings.exchange_settings import ExchangeSettings

INTERVAL_S = 0.1
MISSES = 3
EXCHANGE = ExchangeSettings(
    heartbeat_interval_s=INTERVAL_S, heartbeat_misses=MISSES, transfer_timeout_s=5.0
)
PATIENT = EXCHANGE.model_copy(update={"heartbeat_misses": 30})
STATUS = StatusReply(role="cache", epoch=3, ready=True, values={"steps": 2.0}, info={})


class _Pair:
    """A server and a client on one socket, with what they reported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.busy_s = 0.0
        self.delay_s = 0.0
        self.silences = self.silent_epoch = 0
        self.losses: queue.Queue[str] = queue.Queue()
        self.server = self.serve()
        self.client = HeartbeatClient(path, EXCHANGE, self.losses.put)

    def serve(self) -> HeartbeatServer:
        return HeartbeatServer(
            self.path,
            EXCHANGE,
            busy=lambda: self.busy_s,
            status=self._status,
            on_silence=self._count,
        )

    def _status(self) -> StatusReply:
        time.sleep(self.delay_s)
        return STATUS

    def _count(self, epoch: int) -> None:
        self.silences += 1
        self.silent_epoch = epoch

    def wait_for_silences(self, count: int) -> float:
        start = time.monotonic()
        while self.silences < count and time.monotonic() - start < 3.0:
            time.sleep(0.01)
        assert self.silences == count
        return time.monotonic() - start


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[_Pair]:
    pair = _Pair(tmp_path / "h.sock")
    yield pair
    pair.client.stop()
    pair.server.close()


def test_a_live_pair_loses_nothing(pair: _Pair) -> None:
    pair.server.expect(3)
    pair.client.start(3)
    time.sleep(8 * INTERVAL_S)
    assert pair.losses.empty()
    assert pair.silences == 0


def test_server_gone_is_noticed_once(pair: _Pair) -> None:
    pair.server.expect(3)
    pair.client.start(3)
    time.sleep(2 * INTERVAL_S)
    pair.server.close()
    start = time.monotonic()
    assert "no heartbeat" in pair.losses.get(timeout=3.0)
    assert time.monotonic() - start < 2 * INTERVAL_S * MISSES
    time.sleep(2 * INTERVAL_S * MISSES)
    assert pair.losses.empty()


def test_client_watches_again_after_a_loss(pair: _Pair) -> None:
    pair.client.start(3)
    pair.losses.get(timeout=3.0)
    pair.server.expect(4)
    pair.client.start(4)
    time.sleep(2 * INTERVAL_S * MISSES)
    assert pair.losses.empty()
    pair.server.close()
    pair.losses.get(timeout=3.0)


def test_start_and_stop_may_be_called_from_the_callback(tmp_path: Path) -> None:
    done = threading.Event()
    reasons: list[str] = []

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 1:
            client.start(2)
        else:
            client.stop()
            done.set()

    client = HeartbeatClient(
        tmp_path / "h.sock",
        ExchangeSettings(heartbeat_interval_s=0.02, heartbeat_misses=2, transfer_timeout_s=1.0),
        on_lost,
    )
    client.start(1)
    assert done.wait(3.0)
    assert len(reasons) == 2


def test_wrong_epoch_is_a_loss_at_once(pair: _Pair) -> None:
    pair.server.expect(5)
    pair.client.start(4)
    assert "epoch 5, we are in 4" in pair.losses.get(timeout=3.0)


def test_busy_for_too_long_is_a_loss(pair: _Pair) -> None:
    pair.server.expect(3)
    pair.client.start(3)
    pair.busy_s = 4.9
    time.sleep(3 * INTERVAL_S)
    assert pair.losses.empty()
    pair.busy_s = 5.1
    assert "busy with one message for 5.1 s" in pair.losses.get(timeout=3.0)


def test_stop_is_prompt_and_not_a_loss(pair: _Pair) -> None:
    pair.server.close()
    pair.client.start(3)
    start = time.monotonic()
    pair.client.stop()
    assert time.monotonic() - start < 1.0
    time.sleep(2 * INTERVAL_S * MISSES)
    assert pair.losses.empty()


def test_silence_is_noticed_once_per_epoch(pair: _Pair) -> None:
    pair.server.expect(3)
    time.sleep(2 * INTERVAL_S * MISSES)
    assert pair.silences == 0  # nobody has spoken yet
    pair.client.start(3)
    time.sleep(2 * INTERVAL_S)
    pair.client.stop()
    assert pair.wait_for_silences(1) < 2.5 * INTERVAL_S * MISSES
    time.sleep(2 * INTERVAL_S * MISSES)
    assert (pair.silences, pair.silent_epoch) == (1, 3)
    pair.server.expect(4)
    pair.client.start(4)
    time.sleep(2 * INTERVAL_S)
    pair.client.stop()
    pair.wait_for_silences(2)
    assert pair.silent_epoch == 4


def test_silence_is_noticed_while_others_ask_for_status(pair: _Pair) -> None:
    pair.server.expect(3)
    pair.client.start(3)
    time.sleep(2 * INTERVAL_S)
    pair.client.stop()
    dealer, ends = IpcDealer(pair.path), time.monotonic() + 2.5 * INTERVAL_S * MISSES
    while time.monotonic() < ends:
        dealer.send(StatusRequest())
        assert dealer.receive(1.0) == STATUS
    dealer.close()
    assert pair.silences == 1


def test_heartbeats_of_another_epoch_keep_nothing_alive(pair: _Pair) -> None:
    pair.server.expect(3)
    pair.client.start(3)
    time.sleep(2 * INTERVAL_S)
    pair.client.start(2)
    pair.losses.get(timeout=3.0)
    pair.wait_for_silences(1)


def test_forget_ends_the_watch_and_tells_the_client(pair: _Pair) -> None:
    pair.server.expect(3)
    pair.client.start(3)
    time.sleep(2 * INTERVAL_S)
    pair.server.forget()
    assert "epoch 0" in pair.losses.get(timeout=3.0)
    time.sleep(2 * INTERVAL_S * MISSES)
    assert pair.silences == 0


def test_delay_in_the_server_itself_is_no_silence(pair: _Pair) -> None:
    """Heartbeats wait in the queue while a callback holds the thread."""
    pair.delay_s = 2 * INTERVAL_S * MISSES
    pair.client = HeartbeatClient(pair.path, PATIENT, pair.losses.put)
    pair.server.expect(3)
    pair.client.start(3)
    time.sleep(2 * INTERVAL_S)
    assert request_status(pair.path, 3.0) == STATUS
    time.sleep(INTERVAL_S * MISSES)
    assert pair.silences == 0
    assert pair.losses.empty()


def test_replies_that_came_late_answer_no_later_beats(tmp_path: Path) -> None:
    """A process that hangs long after a pause is noticed as soon as one that never paused."""
    misses, losses = 10, queue.Queue[str]()
    exchange = EXCHANGE.model_copy(update={"heartbeat_misses": misses})
    router = IpcRouter(tmp_path / "h.sock")
    client = HeartbeatClient(tmp_path / "h.sock", exchange, losses.put)

    def answer(count: int) -> None:
        held = [router.receive(3.0) for _ in range(count)]
        for peer, beat in (each for each in held if each is not None):
            assert isinstance(beat, Heartbeat)
            router.send(peer, HeartbeatReply(epoch=3, sequence=beat.sequence, busy_s=0.0))

    try:
        client.start(3)
        answer(misses // 2)  # all at once, as after a pause
        for _ in range(5):
            answer(1)
        while router.receive(0.0) is not None:
            pass  # sent while this thread was late
        unanswered = 0
        while losses.empty():
            unanswered += router.receive(INTERVAL_S) is not None
        assert unanswered <= misses + 1
    finally:
        client.stop()
        router.close()


_SERVE = """
import sys, time
from pathlib import Path
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatServer
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.settings.exchange_settings import ExchangeSettings
def status():
    return StatusReply(role="cache", epoch=3, ready=True, values={}, info={})
exchange = ExchangeSettings(heartbeat_interval_s=0.1, heartbeat_misses=3)
server = HeartbeatServer(Path(sys.argv[1]), exchange, busy=lambda: 0.0, status=status,
    on_silence=lambda epoch: print("silence", flush=True))
server.expect(3)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVE, str(tmp_path / "h.sock")], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_hung_or_dead_process_is_noticed(
    child: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    losses: queue.Queue[str] = queue.Queue()
    client = HeartbeatClient(tmp_path / "h.sock", EXCHANGE, losses.put)
    client.start(3)
    time.sleep(4 * INTERVAL_S)
    assert losses.empty()
    start = time.monotonic()
    child.send_signal(number)
    losses.get(timeout=3.0)
    assert time.monotonic() - start < 2 * INTERVAL_S * MISSES
    client.stop()


def test_pause_of_the_server_itself_is_no_silence(
    child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    losses: queue.Queue[str] = queue.Queue()
    client = HeartbeatClient(tmp_path / "h.sock", PATIENT, losses.put)
    client.start(3)
    time.sleep(3 * INTERVAL_S)
    child.send_signal(signal.SIGSTOP)
    time.sleep(2 * INTERVAL_S * MISSES)
    child.send_signal(signal.SIGCONT)
    time.sleep(2 * INTERVAL_S * MISSES)
    client.stop()
    assert losses.empty()
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    assert not child.stdout.read()


def test_status_of_a_heartbeat_server(pair: _Pair) -> None:
    assert request_status(pair.path, 2.0) == STATUS


def test_status_server(tmp_path: Path) -> None:
    path = tmp_path / "i.sock"
    server = StatusServer(path, status=lambda: STATUS)
    assert request_status(path, 2.0) == STATUS
    server.close()
    server.close()
    assert not path.exists()
    with pytest.raises(CacheRankLostError, match="has the process started"):
        request_status(path, 0.1)


def test_status_of_nobody_times_out(tmp_path: Path) -> None:
    (tmp_path / "x.sock").touch()
    with pytest.raises(CacheRankLostError, match="no answer"):
        request_status(tmp_path / "x.sock", 0.1)


def test_failing_callback_does_not_end_the_server(tmp_path: Path) -> None:
    answers: list[Callable[[], StatusReply]] = [lambda: STATUS, lambda: 1 / 0]  # type: ignore[list-item,return-value]
    server = StatusServer(tmp_path / "i.sock", status=lambda: answers.pop()())
    with pytest.raises(CacheRankLostError):
        request_status(tmp_path / "i.sock", 0.2)
    assert request_status(tmp_path / "i.sock", 2.0) == STATUS
    server.close()


def test_garbage_does_not_end_the_server(pair: _Pair) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(f"ipc://{pair.path}")
        for n in range(100):
            raw.send(bytes([n]) * n)
        raw.send_multipart([b"a", b"b", b"c"])
        assert request_status(pair.path, 2.0) == STATUS


def test_a_watch_that_breaks_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a cache rank that hangs would be waited for until a transfer times out."""

    def no_more_sockets(_path: Path) -> IpcDealer:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(heartbeat, "IpcDealer", no_more_sockets)
    losses: queue.Queue[str] = queue.Queue()
    client = HeartbeatClient(tmp_path / "h.sock", EXCHANGE, losses.put)
    client.start(1)
    try:
        assert "Too many open files" in losses.get(timeout=5)
    finally:
        client.stop()


def test_nobody_is_asked_with_the_last_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq ends the process that has none for a context, and strangers can take them."""
    path, opened = tmp_path / "x.sock", []
    path.touch()

    def open_few(*given: object) -> int:
        if len(opened) == 3:
            raise OSError(errno.EMFILE, "too many open files")
        opened.append(real(*given))  # type: ignore[arg-type, call-overload]
        return opened[-1]

    real = os.open
    monkeypatch.setattr("tandemkv.cache_rank.protocol.ipc.os.open", open_few)
    with pytest.raises(zmq.ZMQError):
        request_status(path, 0.1)
    monkeypatch.undo()
    for handle in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
