# SPDX-License-Identifier: Apache-2.0
"""Meeting a cache rank that comes back: off the scheduler's thread, whatever it raises."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    SettingsError,
)
from tandemkv.inference_rank.reconnect import Reconnecting

PATIENCE_S = 10.0


def wait_for(reconnecting: Reconnecting) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (connection := reconnecting.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return connection


def test_the_scheduler_never_waits() -> None:
    met = threading.Event()
    connection: Any = SimpleNamespace()

    def open_connection(*, timeout_s: float) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        met.wait(timeout_s)
        return connection

    reconnecting = Reconnecting(open_connection)
    begun = time.monotonic()
    assert reconnecting.take() is None
    assert time.monotonic() - begun < 0.5
    met.set()
    assert wait_for(reconnecting) is connection


@pytest.mark.parametrize(
    "error",
    [
        CacheRankLostError("nobody"),
        HandshakeRefusedError("dtype", "other"),
        SettingsError("no directory"),
        OSError(24, "Too many open files"),
        RuntimeError("gloo"),
    ],
)
def test_nothing_that_is_raised_ends_the_tries(error: Exception) -> None:
    tries: list[Exception] = []
    connection: Any = SimpleNamespace()

    def open_connection(*, timeout_s: float) -> Any:
        if len(tries) < 2:
            tries.append(error)
            raise error
        return connection

    assert wait_for(Reconnecting(open_connection)) is connection
    assert len(tries) == 2
