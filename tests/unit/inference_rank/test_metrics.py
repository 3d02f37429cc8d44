# SPDX-License-Identifier: Apache-2.0
"""The thread that publishes metrics outlives a failure."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

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

    publisher = metrics.MetricsPublisher(status, {}, 0)
    publisher.start()
    try:
        assert again.wait(5)
    finally:
        publisher.stop()
        publisher.join(5)
    assert "Too many open files" in caplog.text


def test_several_cache_ranks_have_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {Path("a"): 3.0, Path("b"): 5.0}

    def reply(role: str, steps: float) -> StatusReply:
        found = {"steps_of_test_total": steps, "epoch_of_test": steps}
        return StatusReply(role=role, epoch=1, ready=True, values=found, info={})

    def ask(socket: Path, timeout_s: float) -> StatusReply:
        del timeout_s
        return reply("cache_rank", values[socket])

    monkeypatch.setattr(metrics, "request_status", ask)
    sockets = {4: Path("a"), 5: Path("b")}  # those of the last of three nodes
    publisher = metrics.MetricsPublisher(lambda: reply("inference_rank", 7.0), sockets, 6)
    publisher.publish()
    values[Path("b")] = 9.0
    publisher.publish()

    def shown(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"tandemkv_{name}", labels)

    assert shown("cache_steps_of_test_total", cache_rank="4") == 3.0
    assert shown("cache_steps_of_test_total", cache_rank="5") == 9.0
    assert shown("cache_epoch_of_test", cache_rank="5") == 9.0
    assert shown("inference_steps_of_test_total") == 7.0


def test_a_restarted_cache_rank_counts_on() -> None:
    """Also where its new values are the larger ones."""
    group = metrics.MetricGroup("tandemkv_restart")

    def shown(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"tandemkv_restart_{name}")

    def update(epochs: float, steps: float | None, **life: Any) -> None:
        found = {} if steps is None else {"steps_total": steps}
        group.update({"epochs_total": epochs} | found, **life)

    update(1.0, 20.0, pid="7", epoch=1)
    update(1.0, 25.0, pid="8", epoch=2)
    assert (shown("epochs_total"), shown("steps_total")) == (2.0, 45.0)
    update(1.0, None, pid="8", epoch=0)  # no inference rank is there
    update(1.0, 27.0, pid="8", epoch=2)
    assert (shown("epochs_total"), shown("steps_total")) == (2.0, 47.0)
    update(2.0, 30.0, pid="8", epoch=3)  # the same process, a new engine
    assert (shown("epochs_total"), shown("steps_total")) == (3.0, 77.0)
