"""The launcher over fake ranks: what starts, what is reported, and that nothing survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_launch.py")
PATIENCE_S = 15.0


class Launched:
    """A launcher process over fake ranks in `root`."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.root = root
        self.output = root / "launcher.log"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT), str(root), *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def pids(self, name: str = "") -> list[int]:
        path = self.root / "pids"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(name)]

    def wait_for(self, text: str) -> None:
        eventually(lambda: text in self.text(), lambda: f"no {text!r} in: {self.text()}")

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


def eventually(condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # nobody reaps orphans where there is no init


def assert_all_gone(pids: list[int]) -> None:
    eventually(
        lambda: not any(map(is_alive, pids)),
        lambda: f"alive: {[pid for pid in pids if is_alive(pid)]}",
    )


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*arguments: str) -> Launched:
        started.append(Launched(tmp_path, *arguments))
        return started[-1]

    yield start
    for item in started:
        for pid in [item.process.pid, *item.pids()]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        item.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_leaves_nothing(
    launch: Callable[..., Launched], number: signal.Signals
) -> None:
    launched = launch("serve", "parent")
    launched.wait_for("READY")
    pids = launched.pids()
    assert len(pids) == 3
    launched.process.send_signal(number)
    assert launched.wait() == 0
    assert_all_gone(pids)
    assert not (launched.root / "run").exists()
    text = launched.text()
    assert "stopped" in text
    assert "sglang: sglang begins" in text  # --verbose echoes the logs


def test_kills_what_ignores_sigterm(launch: Callable[..., Launched]) -> None:
    launched = launch("stubborn", "stubborn")
    launched.wait_for("READY")
    pids = launched.pids()
    assert len(pids) == 4
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(pids)


def test_kill_9_of_the_launcher_leaves_nothing(launch: Callable[..., Launched]) -> None:
    launched = launch("stubborn", "parent")
    launched.wait_for("READY")
    pids = launched.pids()
    launched.process.kill()
    assert_all_gone(pids)
    eventually(lambda: not (launched.root / "run").exists(), lambda: "run directory is left")


@pytest.mark.parametrize(
    ("cache_mode", "sglang_mode", "culprit"),
    [("die", "serve", "cache"), ("serve", "die", "sglang")],
)
def test_a_rank_that_dies_while_starting_is_reported_with_its_log(
    launch: Callable[..., Launched], cache_mode: str, sglang_mode: str, culprit: str
) -> None:
    launched = launch(cache_mode, sglang_mode)
    assert launched.wait() == 1
    text = launched.text()
    assert f"LaunchError: {culprit} ended: exit code 3" in text
    assert f"{culprit}: no such tensor" in text
    assert (launched.root / "run" / f"{culprit}.log").exists()  # kept for reading
    assert_all_gone(launched.pids())


def test_a_start_that_takes_too_long_says_why(launch: Callable[..., Launched]) -> None:
    launched = launch("serve", "never", "4")  # enough for the cache to come up on a busy machine
    assert launched.wait() == 1
    text = launched.text()
    assert "not ready after 4 s (--start-timeout-s): sglang is silent" in text
    assert "sglang begins" in text
    assert_all_gone(launched.pids())


def test_another_server_at_the_address_ends_the_start(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """SGLang stays alive without its port, and the other server would be taken for it."""
    (tmp_path / "taken").touch()
    launched = launch("serve", "serve")
    assert launched.wait() == 1
    assert "LaunchError: another server answers" in launched.text()
    assert "READY" not in launched.text()
    assert_all_gone(launched.pids())


def test_a_signal_while_starting_ends_the_start(launch: Callable[..., Launched]) -> None:
    launched = launch("serve", "never")
    eventually(lambda: len(launched.pids()) == 2, launched.text)
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 0
    assert "READY" not in launched.text()
    assert_all_gone(launched.pids())


def test_restarts_the_cache_rank_and_keeps_sglang(launch: Callable[..., Launched]) -> None:
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    (sglang,) = launched.pids("sglang")
    for count in (1, 2):
        os.kill(launched.pids("cache")[-1], signal.SIGKILL)
        while len(launched.pids("cache")) == count:
            assert launched.process.poll() is None, launched.text()
            time.sleep(0.02)
    text = launched.text()
    assert "cache rank ended: signal SIGKILL" in text
    assert "restart in 0.2 s" in text  # the second pause is twice the first
    assert launched.pids("sglang") == [sglang]
    assert is_alive(sglang)
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


def test_a_cache_rank_that_hangs_is_started_again(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch("serve", "serve", "5")
    launched.wait_for("READY")
    (first,) = launched.pids("cache")
    os.kill(first, signal.SIGSTOP)
    (tmp_path / "hung").touch()
    launched.wait_for("cache rank hangs")
    (tmp_path / "hung").unlink()
    launched.wait_for("cache rank restarted")
    assert not is_alive(first)
    eventually(lambda: len(launched.pids("cache")) == 2, launched.text)
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


def test_ends_with_an_error_when_sglang_dies(launch: Callable[..., Launched]) -> None:
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    os.kill(launched.pids("sglang")[0], signal.SIGKILL)
    assert launched.wait() == 1
    assert "LaunchError: SGLang ended: signal SIGKILL" in launched.text()
    assert_all_gone(launched.pids())
