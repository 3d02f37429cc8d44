# SPDX-License-Identifier: Apache-2.0
"""The thread that publishes metrics outlives a failure."""

from __future__ import annotations

import threading

import pytest

from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.inference_rank import metrics


def test_a_failure_does_not_end_the_publisher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else ``/metrics`` would show the last values for ever, ``cache_rank_up 1`` among them."""
    monkeypatch.setattr(metrics, "_INTERVAL_S", 0.01)
    asked, again = [], threading.Event()

    def status() -> StatusReply:
        asked.append(1)
        if len(asked) > 1:
            again.set()
        raise OSError("Too many open files")

    publisher = metrics.MetricsPublisher(status, None)
    publisher.start()
    try:
        assert again.wait(5)
    finally:
        publisher.stop()
        publisher.join(5)
    assert "Too many open files" in caplog.text
