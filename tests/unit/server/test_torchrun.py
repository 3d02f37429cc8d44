# SPDX-License-Identifier: Apache-2.0
"""The module of torchrun over fake ranks: how everything ends, whoever ends first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torchrun_processes import PATIENCE_S, Launched, launched_processes
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.launch.cache_rank_launch import SETTINGS_FILE, SplitLaunch
from tandemkv.server.launch.supervision import LaunchError
from tandemkv.server.torchrun import app, await_settings, cache_rank_plan


@pytest.fixture
def launched() -> Iterator[Launched]:
    with launched_processes() as found:
        yield found


def test_torchrun_ends_all_when_one_of_its_processes_is_killed(launched: Launched) -> None:
    """A cache rank is started again by its process; without that process all end, or start anew."""
    launched.start_torchrun(max_restarts=1)
    launched.wait_ready()
    workers, run_dirs = launched.workers(), launched.run_dirs()
    assert len(run_dirs) == 1
    os.kill(launched.pids("cache")[0], signal.SIGKILL)
    launched.wait_for(lambda: len(launched.pids("cache")) == 2)
    assert psutil.Process(launched.pids("cache")[1]).ppid() == workers[1].pid
    assert launched.workers() == workers
    workers[1].kill()
    launched.wait_ready(2)
    assert set(launched.workers()).isdisjoint(workers)
    assert launched.run_dirs() != run_dirs
    launched.workers()[0].kill()
    assert launched.wait() == [1]
    launched.assert_nothing_left(*workers)


def test_kill_9_of_torchrun_ends_all(launched: Launched) -> None:
    launched.start_torchrun(max_restarts=0)
    launched.wait_ready()
    workers = launched.workers()
    launched.processes[0].kill()
    launched.assert_nothing_left(*workers)
    assert launched.text().count("stopped") == 1  # it drained


def test_a_second_ctrl_c_to_torchrun_ends_all_at_once(launched: Launched) -> None:
    """torchrun is gone then, while its processes still drain."""
    launched.start_torchrun(max_restarts=0)
    launched.wait_ready()
    workers = launched.workers()
    os.kill(launched.pids("sglang")[0], signal.SIGSTOP)  # it never ends by itself
    begun = time.monotonic()
    launched.processes[0].send_signal(signal.SIGINT)
    launched.wait_for(lambda: "draining for at most" in launched.text())
    launched.processes[0].send_signal(signal.SIGINT)
    assert launched.wait() == [1]
    launched.assert_nothing_left(*workers)
    assert time.monotonic() - begun < 15.0  # of 2 s of drain and 15 s to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_cache_rank_ends_with_the_launch(launched: Launched, number: int) -> None:
    """Where no torchrun says so: the run directory of the first process is gone."""
    launched.start_workers("serve")
    launched.wait_ready()
    launched.processes[0].send_signal(number)
    assert launched.wait() == [0 if number == signal.SIGTERM else -number, 0]
    launched.assert_nothing_left()


def test_the_process_of_the_cache_rank_fails_if_it_ends_before_the_launch(
    launched: Launched,
) -> None:
    """torchrun takes no notice of a process that ends well, and the server would wait for ever."""
    launched.start_workers("serve")
    launched.wait_ready()
    launched.processes[1].terminate()
    assert launched.processes[1].wait(PATIENCE_S) == 1
    assert launched.processes[0].poll() is None
    launched.processes[0].terminate()
    assert launched.processes[0].wait(PATIENCE_S) == 0
    launched.assert_nothing_left()


def test_a_cache_rank_that_ends_too_often_is_reported_and_its_log_stays(
    launched: Launched,
) -> None:
    launched.start_workers("die")
    assert launched.processes[1].wait(PATIENCE_S) == 1
    assert "error: cache rank ended: exit code 3" in launched.text()
    launched.processes[0].terminate()  # as torchrun does then
    assert launched.processes[0].wait(PATIENCE_S) == 0
    (run_dir,) = launched.run_dirs()
    assert [path.name for path in run_dir.iterdir()] == ["cache_rank.log"]


@pytest.mark.parametrize(
    ("options", "count", "said"),
    [
        (("--cache-ranks", "1"), 3, "started 3 processes, and these settings have 2"),
        (("--tp", "2"), 4, "started 4 processes, and these settings have 3"),
        (("--transport", "message"), 2, "has to know where the cache ranks listen"),
        (("--cache-ranks", "0"), 2, "started 2 processes, and these settings have 1"),
        (("--no-such-option",), 2, "No such option"),
    ],
)
def test_a_refusal_is_said_once_and_by_the_first(
    launched: Launched, options: tuple[str, ...], count: int, said: str
) -> None:
    launched.start_workers("serve", *options, count=count)
    assert launched.wait() == [2] * count
    assert launched.text().count(said) == 1
    assert launched.pids() == []
    assert launched.run_dirs() == []


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["smollm2"])
    assert result.exit_code == 2
    assert "torchrun --standalone --nproc-per-node N -m tandemkv.server.torchrun" in result.stderr
    assert "tandemkv serve" in result.stderr


def test_help_is_that_of_serve() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    for part in ("N is 1 + C", "--cache-ranks", "--tp", "--api-key-file", "SGLANG ARGS"):
        assert part in text
    for part in ("--nnodes M", "--cache-rank-address tcp://IP:PORT", "--link-keys"):
        assert part in text


def test_settings_of_another_launch_are_not_taken(tmp_path: Path) -> None:
    """A run directory that the user gave may hold those of a launch that was killed."""
    path = tmp_path / "run"
    mine, other = (SplitLaunch(run_dir=path, launch_id=name) for name in ("mine", "other"))
    config = RunDir.create(path).path / SETTINGS_FILE
    config.write_text(f"{other.mark}model: there\n")
    with pytest.raises(LaunchError, match="no settings of the first process"):
        await_settings(path, mine, 0.3)
    config.write_text(f"{mine.mark}model: here\nstandby: true\ndrain_timeout_s: 7\n")
    found = await_settings(path, mine, 5.0)
    assert found.model == "here"


def test_a_directory_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    launch = SplitLaunch(run_dir=path, launch_id="mine")
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    (path / SETTINGS_FILE).write_text(f"{launch.mark}model: theirs\n")
    with pytest.raises(LaunchError):
        await_settings(path, launch, 0.3)


def test_the_second_process_starts_what_the_settings_say(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_dir = RunDir.create(path)
    launch = SplitLaunch(run_dir=path, launch_id="x")
    (path / SETTINGS_FILE).write_text(
        f"{launch.mark}model: here\nstandby: true\ndrain_timeout_s: 7\nmax_restarts: 3\n"
    )
    plan = cache_rank_plan(await_settings(path, launch, 5.0), run_dir)
    (rank,) = plan.cache_ranks
    assert rank.spec is not None
    assert rank.standby is not None
    assert plan.sglang is None
    # A signal that both processes get leaves it to requests under way.
    assert rank.spec.stop_signal == signal.SIGTERM
    assert rank.spec.argv[-1] == str(path / SETTINGS_FILE)
    assert (plan.drain_timeout_s, plan.rules.max_restarts) == (7.0, 3)
    assert not plan.is_over()
    plan.clean_up(False)
    assert not (path / "keep-logs").exists()
    plan.clean_up(True)
    assert (path / "keep-logs").exists()
    run_dir.clear()
    assert plan.is_over()
    assert not (path / "keep-logs").exists()


def test_each_later_process_starts_a_cache_rank_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_dir = RunDir.create(path)
    launch = SplitLaunch(run_dir=path, launch_id="x")
    (path / SETTINGS_FILE).write_text(f"{launch.mark}model: here\ncache_ranks: 3\n")
    settings = await_settings(path, launch, 5.0)
    found = []
    for number in range(3):
        (rank,) = cache_rank_plan(settings, run_dir, number).cache_ranks
        assert rank.spec is not None
        found.append((rank.spec.name, rank.spec.log_path.name, rank.spec.argv[4:-2]))
        assert str(run_dir.of_rank(number).path) in rank.spec.argv
    assert [name for name, _, _ in found] == ["cache rank 0", "cache rank 1", "cache rank 2"]
    assert [log for _, log, _ in found] == [
        "cache_rank.log",
        "cache_rank1.log",
        "cache_rank2.log",
    ]
    assert [argv[-2:] == ("--rank", str(n)) for n, (_, _, argv) in enumerate(found)] == [
        False,
        True,
        True,
    ]


def test_four_processes_of_torchrun_are_one_server(launched: Launched) -> None:
    launched.start_workers("serve", "--cache-ranks", "3", count=4)
    launched.wait_ready()
    launched.wait_for(lambda: len(launched.pids("cache")) == 3)
    os.kill(launched.processes[0].pid, signal.SIGTERM)
    assert launched.wait() == [0, 0, 0, 0]
    launched.assert_nothing_left()


@pytest.mark.parametrize("count", [2, 3])
def test_tensor_parallel_ranks_have_a_process_for_each_cache_rank(
    launched: Launched, count: int
) -> None:
    """One for each of them, or one for both."""
    launched.start_workers("serve", "--tp", "2", count=count)
    launched.wait_ready()
    launched.wait_for(lambda: len(launched.pids("cache")) == count - 1)
    os.kill(launched.processes[0].pid, signal.SIGTERM)
    assert launched.wait() == [0] * count
    launched.assert_nothing_left()
