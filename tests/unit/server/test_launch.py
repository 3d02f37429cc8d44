"""The launcher over fake ranks: what starts, what is reported, and that nothing survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_launch.py")
PATIENCE_S = 15.0


class Launched:
    """A launcher process over fake ranks in `root`."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.root = root / arguments[3] if len(arguments) > 3 else root
        self.output = root / f"launcher-{self.root.name}.log"
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
    assert "cache ended: signal SIGKILL" in text
    assert "requests wait for it, for --recovery-timeout-s at most" in text
    assert launched.pids("sglang") == [sglang]
    assert is_alive(sglang)
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


@pytest.mark.parametrize("state", ["silent", "stalled"])
@pytest.mark.parametrize("name", ["cache", "sglang"])
def test_a_rank_that_hangs_is_ended_and_started_again(
    launch: Callable[..., Launched], tmp_path: Path, name: str, state: str
) -> None:
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    (first,) = launched.pids(name)
    os.kill(first, signal.SIGSTOP)
    (tmp_path / f"{name}.{state}").write_text("7")
    launched.wait_for(f"{name} hangs")
    (tmp_path / f"{name}.{state}").unlink()
    launched.wait_for(f"{name} ready again")
    assert not is_alive(first)
    assert len(launched.pids(name)) == 2
    reason = "its work has not moved for 7 s" if state == "stalled" else f"{name} does not answer"
    assert reason in launched.text()
    assert "allowed are 3 s (--hang-timeout-s)" in launched.text()
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


def test_who_answers_requests_is_told_of_a_hang_below_it(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch("serve", "answering")
    launched.wait_for("READY")
    (tmp_path / "sglang.stalled").write_text("7")
    launched.wait_for("sglang ended: exit code 0")
    assert (tmp_path / "sglang.answered").exists()
    (tmp_path / "sglang.stalled").unlink()
    launched.wait_for("sglang ready again")


def test_a_rank_that_is_busy_and_moves_is_left_alone(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    for name in ("cache", "sglang"):
        (tmp_path / f"{name}.stalled").write_text("2.7")
    time.sleep(6.0)  # twice what may pass without progress
    assert "hangs" not in launched.text()
    assert len(launched.pids()) == 2


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_of_several_nodes_sglang_ends_the_launch_with_0_alone(
    launch: Callable[..., Launched], tmp_path: Path, number: signal.Signals, ends: bool
) -> None:
    """Another node has asked for the end; one that has died is started again."""
    (tmp_path / "nodes").touch()
    (tmp_path / "sglang.finish").touch()
    launched = launch("serve", "draining")
    launched.wait_for("READY")
    (sglang,) = launched.pids("sglang")
    os.kill(sglang, number)
    if not ends:
        launched.wait_for("sglang restarted")
        return
    assert launched.wait() == 0
    assert "another node has ended the server\nstopped" in launched.text()
    assert "restart 1" not in launched.text()
    assert_all_gone(launched.pids())


def test_restarts_sglang_and_keeps_the_cache_rank(launch: Callable[..., Launched]) -> None:
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    (cache,) = launched.pids("cache")
    os.kill(launched.pids("sglang")[0], signal.SIGKILL)
    launched.wait_for("sglang ready again")
    text = launched.text()
    assert "sglang ended: signal SIGKILL" in text
    assert "restart 1 of 2 in 0.1 s, the server is not ready" in text
    assert len(launched.pids("sglang")) == 2
    assert launched.pids("cache") == [cache]
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


@pytest.mark.parametrize("name", ["cache", "sglang"])
def test_too_many_restarts_end_the_launch(launch: Callable[..., Launched], name: str) -> None:
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    for count in (1, 2, 3):
        eventually(lambda count=count: len(launched.pids(name)) == count, launched.text)
        os.kill(launched.pids(name)[-1], signal.SIGKILL)
    assert launched.wait() == 1
    text = launched.text()
    assert "it was started again 2 times in 10 minutes, allowed are 2 (--max-restarts)" in text
    assert "restart 2 of 2 in 0.2 s" in text  # the second pause is twice the first
    assert (launched.root / "run" / f"{name}.log").exists()  # kept for reading
    assert_all_gone(launched.pids())


@pytest.mark.parametrize(("name", "other"), [("standby", "cache"), ("cache", "standby")])
def test_one_of_two_cache_ranks_goes_on_alone(
    launch: Callable[..., Launched], tmp_path: Path, name: str, other: str
) -> None:
    """The server does not end with what only waits to be needed."""
    (tmp_path / "has-standby").touch()
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    for count in (1, 2, 3):
        eventually(lambda count=count: len(launched.pids(name)) == count, launched.text)
        os.kill(launched.pids(name)[-1], signal.SIGKILL)
    launched.wait_for(f"{other} goes on alone")
    assert f"no more restarts: {name} ended: signal SIGKILL; it was started" in launched.text()
    os.kill(launched.pids(other)[0], signal.SIGKILL)
    launched.wait_for(f"{other} ready again")  # it is kept as before
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


def draining(launch: Callable[..., Launched], folder: Path) -> Launched:
    """Return a launcher that was told to end, and waits for SGLang's requests."""
    launched = launch("serve", "draining")
    launched.wait_for("READY")
    launched.process.terminate()
    eventually(lambda: (folder / "sglang.draining").exists(), launched.text)
    return launched


def test_sglang_may_finish_and_the_cache_rank_ends_last(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = draining(launch, tmp_path)
    assert is_alive(launched.pids("cache")[0])
    (tmp_path / "sglang.finish").touch()
    assert launched.wait() == 0
    assert "draining for at most 0.3 s" in launched.text()
    assert (tmp_path / "sglang.ended").exists()  # by itself, with the cache rank there
    assert_all_gone(launched.pids())


def test_a_cache_rank_that_is_lost_while_sglang_drains_is_started_again(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Requests under way wait for it."""
    launched = draining(launch, tmp_path)
    os.kill(launched.pids("cache")[0], signal.SIGKILL)
    eventually(lambda: len(launched.pids("cache")) == 2, launched.text)
    (tmp_path / "sglang.finish").touch()
    assert launched.wait() == 0
    assert (tmp_path / "sglang.ended").exists()
    assert len(launched.pids("cache")) == 2  # its own end is none that it is started again after
    assert_all_gone(launched.pids())


def test_a_second_signal_ends_it_at_once(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = draining(launch, tmp_path)
    launched.process.terminate()
    assert launched.wait() == 0
    assert not (tmp_path / "sglang.ended").exists()
    assert_all_gone(launched.pids())


@pytest.fixture
def user_files(tmp_path: Path) -> Iterator[list[Path]]:
    """Files that a user keeps in ``/dev/shm``, which the fake rank maps as well."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="psm_") as folder,
        tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="torch_model-", suffix=".gguf") as model,
    ):
        files = [Path(folder) / "model-00001.safetensors", Path(model.name)]
        for file in files:
            file.write_bytes(bytes(4096))
        (tmp_path / "user_files").write_text("\n".join(map(str, files)))
        yield files


def test_shared_memory_of_killed_ranks_is_removed(
    launch: Callable[..., Launched], user_files: list[Path]
) -> None:
    """A rank maps a segment with a name of its library's choice, and cannot remove it.

    It maps the checkpoint, too, which stays.
    """
    for end in (signal.SIGTERM, signal.SIGKILL):
        launched = launch("shared", "serve", "20", end.name)
        launched.wait_for("READY")
        segment = Path((launched.root / "cache.segment").read_text())
        assert segment.exists()
        time.sleep(2.0)  # the watchdog looks now and then; with the launcher, ranks are killed
        launched.process.send_signal(end)
        launched.wait()
        eventually(lambda path=segment: not path.exists(), lambda path=segment: f"{path} is left")
        assert all(file.exists() for file in user_files)


def test_a_lost_cache_rank_of_two_is_started_again_alone(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "two").touch()
    launched = launch("serve", "serve")
    launched.wait_for("READY")
    (first,), (second,), (sglang,) = (launched.pids(name) for name in ("cache", "second", "sglang"))
    os.kill(second, signal.SIGKILL)
    launched.wait_for("second ready again")
    assert "second ended: signal SIGKILL" in launched.text()
    assert len(launched.pids("second")) == 2
    assert (launched.pids("cache"), launched.pids("sglang")) == ([first], [sglang])
    launched.process.terminate()
    assert launched.wait() == 0
    assert_all_gone(launched.pids())


@pytest.mark.parametrize("waits", [False, True])
def test_the_start_waits_for_each_cache_rank(
    waits: bool, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """SGLang loads meanwhile, but where the other host of its cache rank may come much later."""
    (tmp_path / "two").touch()
    if waits:
        (tmp_path / "waits").touch()
    launched = launch("never", "serve", "4")
    assert launched.wait() == 1
    assert len(launched.pids("cache")) == len(launched.pids("second")) == 1
    assert len(launched.pids("sglang")) == (0 if waits else 1)
    assert "not ready after 4 s (--start-timeout-s): cache is silent" in launched.text()
    assert_all_gone(launched.pids())
