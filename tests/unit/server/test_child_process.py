# SPDX-License-Identifier: Apache-2.0
"""The log of a child that runs for months."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tandemkv.server import child_process
from tandemkv.server.child_process import ChildProcess, ChildSpec

TALKER = """
import sys, time
for number in range(2000):
    print("line", number, flush=True)
    time.sleep(0.0005)
"""


def test_the_log_is_bounded_while_the_child_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_MAX_LOG_BYTES", 4096)
    log = tmp_path / "child.log"
    child = ChildProcess(
        ChildSpec(
            name="talker", argv=(sys.executable, "-c", TALKER), env=dict(os.environ), log_path=log
        )
    )
    child.start()
    seen: list[str] = []
    largest = 0
    deadline = time.monotonic() + 30
    while child.exit_status() is None:
        assert time.monotonic() < deadline
        largest = max(largest, log.stat().st_size)
        seen += child.new_log_lines()
        child.bound_log()
        time.sleep(0.002)
    seen += child.new_log_lines()
    child.kill_group()
    assert largest < 4 * 4096
    assert log.stat().st_size < 4 * 4096
    assert {path.name for path in tmp_path.iterdir()} == {"child.log", "child.log.1"}
    assert b"\0" not in log.read_bytes()  # the child goes on at the end, not at its old place
    assert child.log_tail(1) == "line 1999"
    numbers = [int(line.split()[1]) for line in seen if line.startswith("line ")]
    assert len(numbers) > 1900
    assert numbers == sorted(set(numbers))
