# SPDX-License-Identifier: Apache-2.0
"""Both ranks' counters on SGLang's ``/metrics`` (Prometheus, multi-process mode).

A thread of the scheduler process copies them every few seconds, so that a scrape costs
nothing and a lost cache rank shows as ``tandemkv_inference_cache_rank_up 0``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import TandemKVError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.messages import StatusReply

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 2.0
_TIMEOUT_S = 0.5


class MetricGroup:
    """Mirrors the values of one rank as metrics named ``<prefix>_<name>``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._metrics: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def update(self, values: Mapping[str, float]) -> None:
        """Bring the metrics up to `values`; names ending in ``_total`` are counters."""
        # Imported late: the multi-process directory must be in the environment by then.
        from prometheus_client import Counter, Gauge

        for name, value in values.items():
            is_counter = name.endswith("_total")
            metric = self._metrics.get(name)
            if metric is None:
                full, text = f"{self._prefix}_{name}", name.replace("_", " ")
                metric = (
                    Counter(full, text)
                    if is_counter
                    else Gauge(full, text, multiprocess_mode="mostrecent")
                )
                self._metrics[name] = metric
            if not is_counter:
                metric.set(value)
                continue
            last = self._last.get(name, 0.0)
            # A restarted cache rank counts from zero again.
            metric.inc(value - last if value >= last else value)
            self._last[name] = value


class MetricsPublisher(threading.Thread):
    """Publishes until the process ends."""

    def __init__(
        self, own_status: Callable[[], StatusReply], cache_rank_socket: Path | None
    ) -> None:
        super().__init__(name="tandemkv-metrics", daemon=True)
        self._own_status = own_status
        self._cache_rank_socket = cache_rank_socket
        self._inference = MetricGroup("tandemkv_inference")
        self._cache = MetricGroup("tandemkv_cache")
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Copy both ranks' values every few seconds."""
        while not self._stop_event.wait(_INTERVAL_S):
            try:
                self.publish()
            except Exception:  # values that stand still would look like a healthy server's
                _LOG.exception("metrics are not up to date")

    def publish(self) -> None:
        """Copy the values once."""
        self._inference.update(self._own_status().values)
        if self._cache_rank_socket is None:
            return
        try:
            reply = request_status(self._cache_rank_socket, timeout_s=_TIMEOUT_S)
        except TandemKVError:
            return  # shown as cache_rank_up 0 by the inference rank's own values
        self._cache.update(reply.values)

    def stop(self) -> None:
        """End the thread."""
        self._stop_event.set()
