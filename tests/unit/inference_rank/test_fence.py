# SPDX-License-Identifier: Apache-2.0
"""No process of an earlier epoch writes to shared memory once the next begins."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from shared_forward import Forward, settings_of
from stream_forward import engine_of
from tiny_model import write_model

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.inference_rank.links.fence import Fence

_PEER = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1]); s.listen(1); print("up", flush=True)
c, _ = s.accept(); exec(sys.argv[2]); time.sleep(600)
"""


def connect(
    path: Path, then: str = "", *, program: str = _PEER
) -> tuple[subprocess.Popen[str], socket.socket]:
    peer = subprocess.Popen(
        [sys.executable, "-c", program, str(path), then], stdout=subprocess.PIPE, text=True
    )
    assert peer.stdout is not None
    assert peer.stdout.readline() == "up\n"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    return peer, connection


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_that_lives_is_ended(tmp_path: Path, is_stopped: bool) -> None:
    peer, connection = connect(tmp_path / "s")
    fence = Fence(connection)
    connection.close()
    if is_stopped:
        os.kill(peer.pid, signal.SIGSTOP)
    fence.close(10.0)
    assert peer.wait(10) == -signal.SIGKILL
    fence.close(0.0)


_POLITE = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1]); s.listen(1); print("up", flush=True)
c, _ = s.accept(); c.recv(1); time.sleep(0.2); c.close(); time.sleep(600)
"""


def test_one_that_was_told_has_time_to_let_go(tmp_path: Path) -> None:
    peer, connection = connect(tmp_path / "s", program=_POLITE)
    fence = Fence(connection)
    fence.grace_s = 10.0
    connection.send(b"x")
    connection.close()
    fence.close(10.0)
    assert peer.poll() is None
    peer.kill()
    peer.wait(10)


def test_one_that_ends_meanwhile_is_waited_for(tmp_path: Path) -> None:
    """Its end of the connection may be open for a moment longer; here its child has it."""
    then = "import os; c.recv(1); os.fork() and os._exit(0); time.sleep(1.0); os._exit(0)"
    peer, connection = connect(tmp_path / "s", then)
    fence = Fence(connection)
    connection.send(b"x")
    connection.close()
    assert peer.wait(10) == 0
    fence.close(10.0)


def test_one_that_was_told_and_is_stopped_is_ended(tmp_path: Path) -> None:
    peer, connection = connect(tmp_path / "s", program=_POLITE)
    fence = Fence(connection)
    fence.grace_s = 0.3
    os.kill(peer.pid, signal.SIGSTOP)
    connection.send(b"x")
    connection.close()
    fence.close(10.0)
    assert peer.wait(10) == -signal.SIGKILL


def test_one_that_has_ended_is_left_alone(tmp_path: Path) -> None:
    peer, connection = connect(tmp_path / "s")
    fence = Fence(connection)
    peer.kill()
    peer.wait(10)
    fence.close(10.0)
    connection.close()


def test_one_that_is_ended_has_ended(tmp_path: Path) -> None:
    """Not its connection alone: what else it has open goes in any order."""
    peer, connection = connect(tmp_path / "s")
    fence = Fence(connection)
    connection.close()
    fence.close(10.0)
    state = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "Z"
    peer.wait(10)


def test_one_that_has_hung_up_lives_on(tmp_path: Path) -> None:
    peer, connection = connect(tmp_path / "s", then="c.close()")
    fence = Fence(connection)
    fence.grace_s = 5.0  # it hangs up as soon as it is given time to
    fence.close(10.0)
    assert peer.poll() is None
    connection.close()
    peer.kill()
    peer.wait(10)


def test_an_open_end_that_cannot_be_ended_is_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fence = Fence(ours)  # the other end is this process itself, which is not killed
    with pytest.raises(CacheRankLostError, match="end it"):
        fence.close(0.05)
    theirs.close()
    fence.close(1.0)
    ours.close()


def test_one_that_cannot_be_ended_and_lives_lets_go_by_itself(tmp_path: Path) -> None:
    """As in a container of its own, after a step that took it too long; it has heartbeats still."""
    settings = settings_of("oracle", {}, index_dtype="int8")
    run_dir, model_dir = RunDir.create(tmp_path / "run"), write_model(tmp_path / "model")
    with engine_of(run_dir, model_dir, settings, homes=Homes.on_host()):  # of this process
        played = Forward(run_dir, model_dir, settings)
        connection = played.connection
        connection.mark_lost("no answer within 4 s")  # type: ignore[call-arg]
        connection.adopt(connection.open_connection(timeout_s=5.0))  # type: ignore[arg-type]
        played.begin()
        assert played.num_lost == 0
        connection.close()
        played.kept.close()
