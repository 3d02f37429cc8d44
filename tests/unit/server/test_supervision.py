# SPDX-License-Identifier: Apache-2.0
"""When a rank that ended is started again."""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.server.launch.liveness import Liveness, Pulse
from tandemkv.server.launch.supervision import LaunchError, RestartRules, SupervisedRank, tail

NO_PROCESS = 1 << 30
FIRST_S = 0.01


class EndingChild:
    """A child that has ended whenever it is looked at."""

    spec = SimpleNamespace(name="cache rank", log_path="cache_rank.log")
    pid, is_started, starts = NO_PROCESS, True, 0

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures  # of starts but the first

    def start(self) -> None:
        self.starts += 1
        if 1 < self.starts <= 1 + self.failures:
            raise BlockingIOError(errno.EAGAIN, "no more processes")

    def exit_status(self) -> str | None:
        return "signal SIGKILL"

    def log_tail(self, lines: int = 20) -> str:
        return "its last words"[:lines]

    def kill_group(self) -> None:
        """Nothing is left of it."""


class RunningChild(EndingChild):
    """A child that runs, also when it was killed, until it is given a status."""

    status: str | None = None
    kills, grace_s = 0, -1.0

    def exit_status(self) -> str | None:
        return self.status

    def tell_hang(self) -> bool:
        return False

    def kill(self) -> None:
        self.kills += 1

    def kill_group(self) -> None:
        assert self.status, "that waits"

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        self.grace_s = grace_s


def supervised(
    child: EndingChild, liveness: Liveness, rules: RestartRules, said: io.StringIO
) -> SupervisedRank:
    watchdog, console = SimpleNamespace(watch=int, forget=int), Console(file=said, width=200)
    return SupervisedRank(
        cast(Any, child), cast(Any, watchdog), liveness, rules, console, meanwhile="requests wait"
    )


def lives(*, is_ready: bool, count: int, waits: bool = False, failures: int = 0) -> list[str]:
    """Let a rank end `count` times, ready before or not; return what is said of each restart.

    `waits`: another serves all the time. `failures`: so many starts do not succeed.
    """
    child, said = EndingChild(failures), io.StringIO()
    liveness = Liveness(lambda: Pulse(is_ready=is_ready, stalled_s=0.0, waits=waits), 0.001)
    rules = RestartRules(
        hang_timeout_s=1.0, start_timeout_s=1.0, max_restarts=count, first_backoff_s=FIRST_S
    )
    rank = supervised(child, liveness, rules, said)
    rank.start()
    if waits:
        liveness.start()
    while child.starts <= count:
        if is_ready and not waits:
            liveness.note_ready()
        while waits and not liveness.waits:  # a moment: it is asked all the time
            time.sleep(FIRST_S / 10)
        rank.keep()
        time.sleep(FIRST_S / 10)
    with pytest.raises(LaunchError, match=f"started again {count} times .*--max-restarts"):
        rank.keep()
    return [line.split(" in ")[1].split(" s,")[0] for line in said.getvalue().splitlines()
            if "; restart" in line]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        (
            "sglang serve: error: unrecognized arguments: --foo",
            2,
            "unrecognized arguments: --foo; ",
        ),
        ("sglang serve: error: argument --tp: invalid int value: 'x'", 2, "argument --tp: inv"),
        ("launch_server.py: error: ambiguous option: --max could match --maxa, --maxb", 2, "ambig"),
        ("sglang serve: error: unrecognized arguments: --foo", 1, ""),
        ("out of memory", 2, ""),
        ("x: error: unrecognized arguments: --foo\nTraceback", 2, ""),
    ],
)
def test_an_argument_that_sglang_refuses_says_what_to_do(last: str, status: int, said: str) -> None:
    child = EndingChild()
    text = f"usage: sglang serve [-h] --model-path MODEL_PATH\n{last}"
    child.__dict__.update(log_tail=lambda: text, exit_status=lambda: f"exit code {status}")
    found = tail(cast(Any, child))
    if said:
        assert found.startswith(f"SGLang refuses what follows --: {said}")
        assert "correct it there" in found
        assert "usage:" not in found
    else:
        assert found == f"last lines of cache_rank.log:\n{text}"


@pytest.mark.parametrize(("was_ready", "why"), [(True, "no answer"), (False, "become ready")])
def test_one_that_was_not_asked_since_is_not_judged(was_ready: bool, why: str) -> None:
    """After a stop of the launcher, as with Ctrl-Z, it is looked at before it is asked again."""

    def ask() -> Pulse:
        raise CacheRankLostError("nobody is there")

    child, said, liveness = RunningChild(), io.StringIO(), Liveness(ask, 0.01)
    rules = RestartRules(hang_timeout_s=0.05, start_timeout_s=0.05, max_restarts=1)
    rank = supervised(child, liveness, rules, said)
    rank.start()
    if was_ready:
        liveness.note_ready()
    time.sleep(0.1)
    rank.keep()
    assert not child.kills
    liveness.start()
    deadline = time.monotonic() + 10.0
    while not child.kills:
        rank.keep()
        assert time.monotonic() < deadline
    assert why in said.getvalue()
    liveness.stop()


def test_one_that_is_ended_is_not_waited_for() -> None:
    """With much memory, or in a driver, it takes long; others are to be looked after."""
    liveness = Liveness(lambda: Pulse(is_ready=True, stalled_s=9.0), 0.001)
    child, said = RunningChild(), io.StringIO()
    rules = RestartRules(hang_timeout_s=1.0, start_timeout_s=1.0, max_restarts=1)
    rank = supervised(child, liveness, rules, said)
    rank.start()
    liveness.start()
    deadline = time.monotonic() + 10.0
    while not child.kills:
        rank.keep()
        assert time.monotonic() < deadline
    rank.keep()
    assert child.kills == 1
    assert not rank.is_up
    rank.stop(30.0, lambda: False)
    assert child.grace_s == 0.0, "it would not obey"
    assert "restart" not in said.getvalue()
    child.status = "signal SIGKILL"
    rank.keep()
    assert said.getvalue().count("hangs") == 1
    assert "ended: signal SIGKILL" in said.getvalue()
    liveness.stop()


def test_one_that_was_ready_is_started_again_without_delay() -> None:
    assert lives(is_ready=True, count=4) == ["0.01"] * 4


def test_one_that_only_waits_for_another_waits_longer_each_time() -> None:
    """It fails while it loads, perhaps, and nobody misses it."""
    assert lives(is_ready=True, waits=True, count=4) == ["0.01", "0.02", "0.04", "0.08"]


def test_one_that_does_not_become_ready_waits_longer_each_time() -> None:
    assert lives(is_ready=False, count=4) == ["0.01", "0.02", "0.04", "0.08"]


def test_one_that_cannot_be_started_is_tried_again() -> None:
    assert lives(is_ready=False, count=4, failures=2) == ["0.01", "0.02", "0.04", "0.08"]
