# SPDX-License-Identifier: Apache-2.0
"""The thread that publishes metrics outlives a failure."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tandemkv.cache_rank.protocol.messages import TOTALS_OF_PROCESS, StatusReply
from tandemkv.inference_rank import metrics
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.metric_names import HELP, exported
from tandemkv.inference_rank.sglang.pool import Occupancy


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


def test_times_are_exported_in_seconds() -> None:
    group = metrics.MetricGroup("tandemkv_units")
    values = {
        "exchange_wait_us_total": 2_500_000.0,
        "pause_ms_total": 1500.0,
        "pause_s": 3.0,  # its name is free beside that of the counter
        "longest_pause_ms": 900.0,
        "stalled_s": 4.0,
        "announcement_p50_us": 20.0,
        "slots": 8192.0,
    }
    group.update(values)
    group.update(values | {"exchange_wait_us_total": 3_000_000.0})
    shown = {
        sample.name.removeprefix("tandemkv_units_"): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("tandemkv_units_") and not sample.name.endswith("_created")
    }
    assert shown == pytest.approx(
        {
            "exchange_wait_seconds_total": 3.0,
            "paused_seconds_total": 1.5,
            "pause_seconds": 3.0,
            "longest_pause_seconds": 0.9,
            "stalled_seconds": 4.0,
            "announcement_p50_seconds": 20e-6,
            "slots": 8192.0,
        }
    )


def test_counters_say_what_they_count() -> None:
    told = [*Counters().as_values(), *TOTALS_OF_PROCESS]
    assert [name for name in told if name not in HELP] == []
    metrics.MetricGroup("tandemkv_help").update({"seeded_rows_total": 1.0})
    found = {family.name: family.documentation for family in REGISTRY.collect()}
    assert found["tandemkv_help_seeded_rows"] == HELP["seeded_rows_total"]


def test_the_size_of_the_pool_is_no_counter() -> None:
    pool = SimpleNamespace(size=64, available_size=lambda: 24)
    values = Occupancy(
        SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool_allocator=pool)
    ).values()
    assert values == {"request_rows": 40.0, "slots_used": 40.0, "slots": 64.0}


def test_the_manual_names_metrics_as_they_are() -> None:
    text = (Path(__file__).parents[3] / "docs/launch.md").read_text(encoding="utf-8")
    for name in ("exchange_wait_us_total", "pause_ms_total"):
        assert f"`{name}`" in text
        assert f"`tandemkv_inference_{exported(name)[0]}`" in text
    assert "`tandemkv_edge_refused_total{status=...}`" in text
