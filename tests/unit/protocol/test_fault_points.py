# SPDX-License-Identifier: Apache-2.0
"""Fault points: off by default, driven by a seed, listed, and placed where they are said to be."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol import fault_points
from tandemkv.cache_rank.protocol.control import ControlClient, ControlServer
from tandemkv.cache_rank.protocol.errors import CacheRankLostError, SettingsError
from tandemkv.cache_rank.protocol.fault_points import (
    FAULTS_FILE,
    FAULTS_VARIABLE,
    POINTS,
    enable_faults,
    parse_faults,
    reach,
    read_faults,
)
from tandemkv.cache_rank.protocol.messages import Goodbye, StatusRequest
from tandemkv.cache_rank.protocol.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    fault_points._plan = None


def enable(text: str, folder: Path, role: str = "cache_rank") -> None:
    enable_faults(role, folder, {FAULTS_VARIABLE: text})  # type: ignore[arg-type]


def placed() -> dict[str, set[str]]:
    """Points by name, and the files that pass them."""
    found: dict[str, set[str]] = {}
    for package in ("cache_rank", "inference_rank", "server", "kernels"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if "fault_points import" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reach":
                    assert isinstance(node.args[0], ast.Constant)
                    found.setdefault(node.args[0].value, set()).add(path.name)
    return found


def test_every_point_is_placed_and_every_placed_one_is_listed() -> None:
    assert set(placed()) == set(POINTS)


def test_every_point_is_documented() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    for name, point in POINTS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert point.when in row
        assert row.endswith("yes |") is point.can_drop


def test_it_is_off_by_default_and_costs_next_to_nothing(tmp_path: Path) -> None:
    assert enable_faults("cache_rank", tmp_path, {}) == ()
    begun = time.perf_counter()
    for _ in range(100_000):
        assert not reach("ring.read")
    # 40 ns each where nothing else runs; a step of a model takes milliseconds.
    assert time.perf_counter() - begun < 0.5
    assert list(tmp_path.iterdir()) == []


def test_decisions_follow_the_seed_and_the_number_of_the_start(tmp_path: Path) -> None:
    def decisions(seed: int, folder: str) -> list[bool]:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        enable(f"seed={seed};control.receive=drop@0.3", path)
        return [reach("control.receive") for _ in range(200)]

    first = decisions(1, "a")
    assert 30 < sum(first) < 90
    assert decisions(1, "b") == first
    assert decisions(2, "c") != first
    assert decisions(1, "a") != first  # started again: otherwise it would end where it ended before


def test_times_is_kept_across_starts_and_all_that_is_done_is_written_down(tmp_path: Path) -> None:
    for _ in range(2):
        enable("control.receive=drop@1x3;control.answer=delay(0)@1x1", tmp_path)
        dropped = [reach("control.receive") for _ in range(5)]
        assert not reach("control.answer")
    assert dropped == [False] * 5
    done = [(line["action"], line["point"]) for line in read_faults(tmp_path / FAULTS_FILE)]
    drop, start = ("drop", "control.receive"), ("start", "")
    assert done == [start, drop, drop, drop, ("delay", "control.answer"), start]


def test_rules_of_a_file_are_taken_when_it_is_replaced(tmp_path: Path) -> None:
    rules, log = tmp_path / "rules", tmp_path / FAULTS_FILE

    def replace(text: str) -> None:
        time.sleep(0.05)  # files' times are kept in steps of some milliseconds
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(rules)

    assert enable_faults("cache_rank", tmp_path, {FAULTS_VARIABLE: f"@{rules}"}) == ()
    assert not reach("control.receive")
    replace("control.receive=drop@1x2\n")
    assert [reach("control.receive") for _ in range(3)] == [True, True, False]
    replace("control.receive=drop@1x1\n")
    assert [reach("control.receive") for _ in range(3)] == [True, False, False]
    # A process that is started again goes on with the rules, and what was done by them.
    enable_faults("cache_rank", tmp_path, {FAULTS_VARIABLE: f"@{rules}"})
    assert not reach("control.receive")
    rules.unlink()
    assert not reach("control.receive")
    assert [line["action"] for line in read_faults(log)].count("drop") == 3
    replace("ring.read=drop@1")
    with pytest.raises(SettingsError, match=r"nothing is sent at ring\.read"):
        reach("ring.read")


def test_points_of_other_processes_do_nothing(tmp_path: Path) -> None:
    enable("ring.write=drop@1", tmp_path, "cache_rank")
    assert not reach("ring.write")
    enable("ring.write=drop@1", tmp_path, "inference_rank")
    assert reach("ring.write")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ring.nothing=drop@1", "there is no point ring.nothing; there are launcher.start, "),
        ("ring.read=drop@1", "nothing is sent at ring.read; drop is for control.send"),
        ("ring.write=explode@1", "cannot be read"),
        ("ring.write=drop@1.5", "cannot be read"),
        ("ring.write=drop", "cannot be read"),
        ("launcher.turn=stop@1", "nobody would continue a launcher"),
    ],
)
def test_what_cannot_be_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        parse_faults(text)


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("stop", None)])
def test_a_process_is_killed_or_stopped(tmp_path: Path, action: str, code: int | None) -> None:
    program = (
        "from pathlib import Path\n"
        "from tandemkv.cache_rank.protocol.fault_points import enable_faults, reach\n"
        f"enable_faults('cache_rank', Path({str(tmp_path)!r}))\n"
        "while True: reach('cache_rank.layer')\n"
    )
    env = os.environ | {FAULTS_VARIABLE: f"cache_rank.layer={action}@0.01x1"}
    process = subprocess.Popen([sys.executable, "-P", "-c", program], env=env)
    try:
        if code is not None:
            assert process.wait(60) == code
        else:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
    finally:
        process.kill()
        process.wait()
    start, done = read_faults(tmp_path / FAULTS_FILE)
    assert (start["action"], done["action"], done["point"]) == ("start", action, "cache_rank.layer")
    assert done["pid"] == process.pid


def test_a_lost_control_message_is_a_lost_cache_rank_and_no_more(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    server, client = ControlServer(run_dir), ControlClient(run_dir)
    try:
        enable("control.send=drop@1x1", tmp_path, "inference_rank")
        with pytest.raises(CacheRankLostError, match="did not answer StatusRequest"):
            client.request(StatusRequest(), 0.2)
        client.send(Goodbye(epoch=3))
        received = server.poll(2.0)
        assert received is not None
        assert received[1] == Goodbye(epoch=3)
    finally:
        client.close()
        server.close()
