# SPDX-License-Identifier: Apache-2.0
"""What holds memory for two ranks that something else starts, and the probe for containers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.memory.descriptor_socket import let_hold, take_held
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.cli.commands import app

PATIENCE_S = 60.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tandemkv.server", *words]


def alive(role: str, path: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["alive", role, "--run-dir", str(path), *more])
    return result.exit_code, result.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def memory(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command("memory", "--run-dir", str(path)), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while alive("memory", path)[0] != 0:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield process
    process.kill()
    process.communicate()


def test_memory_is_held_until_sigterm(path: Path, memory: subprocess.Popen[str]) -> None:
    run_dir = RunDir.open(path)
    tensors = MappedTensors()
    tensors.allocate("kv", (4,), torch.float32).fill_(3.0)
    assert let_hold(run_dir.holder_socket, tensors, token=run_dir.token, group="kept")
    tensors.close()
    found = take_held(run_dir.holder_socket, token=run_dir.token, group="kept")
    assert found["kv"].tolist() == [3.0] * 4
    found.close()
    memory.send_signal(signal.SIGTERM)
    _, said = memory.communicate(timeout=PATIENCE_S)
    assert memory.returncode == 0
    assert said == f"holding memory for the ranks of {path}\n"
    assert not run_dir.holder_socket.exists()
    assert run_dir.token, "the ranks still know each other"
    code, said = alive("memory", path)
    assert code == 1
    assert "nobody answers" in said


def test_one_process_holds_memory_of_a_run_directory(
    path: Path, memory: subprocess.Popen[str]
) -> None:
    result = CliRunner().invoke(app, ["memory", "--run-dir", str(path)])
    assert result.exit_code == 1
    assert "another live process serves it; stop that one or give another --run-dir" in (
        result.stderr
    )
    assert alive("memory", path)[0] == 0


def test_a_stopped_memory_is_not_alive(path: Path, memory: subprocess.Popen[str]) -> None:
    memory.send_signal(signal.SIGSTOP)
    try:
        assert alive("memory", path)[0] == 1
    finally:
        memory.send_signal(signal.SIGCONT)
    assert alive("memory", path)[0] == 0


def test_a_cache_rank_is_alive_while_it_answers_and_gets_on(path: Path) -> None:
    code, said = alive("cache-rank", path)
    assert code == 2
    assert "start `tandemkv cache-rank` with this --run-dir first" in said
    run_dir = RunDir.create(path)
    code, said = alive("cache-rank", path)
    assert code == 1
    assert "nobody serves it" in said
    values = {"stalled_s": 20.0}
    server = StatusServer(
        run_dir.heartbeat_socket,
        status=lambda: StatusReply(role="cache_rank", epoch=1, ready=True, values=values, info={}),
    )
    try:
        assert alive("cache-rank", path) == (0, "")
        code, said = alive("cache-rank", path, "--hang-timeout-s", "15")
        assert code == 1
        assert "has not moved for 20 s, allowed are 15 s (--hang-timeout-s)" in said
        values["stalled_s"] = 61.0
        assert alive("cache-rank", path)[0] == 1
    finally:
        server.close()


def test_neither_imports_torch() -> None:
    """A probe runs every few seconds, and who holds memory is to be small."""
    script = (
        "import sys, tandemkv.server.cli.commands\n"
        "print([name for name in ('torch', 'transformers', 'sglang') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"
