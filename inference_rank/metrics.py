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
from tandemkv.cache_rank.protocol.messages import TOTALS_OF_PROCESS, StatusReply

from .metric_names import HELP, exported

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 2.0
_TIMEOUT_S = 0.5


class MetricGroup:
    """Mirrors the values of ranks of a kind as metrics ``<prefix>_<name>``, as `exported`.

    `prefix` begins their names; `label` tells several ranks apart, without one there is one rank.
    """

    def __init__(self, prefix: str, label: str | None = None) -> None:
        self._prefix, self._labels = prefix, () if label is None else (label,)
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, int], float] = {}
        self._lives: dict[int, tuple[str, int]] = {}

    def update(
        self, values: Mapping[str, float], rank: int = 0, *, pid: str = "", epoch: int = 0
    ) -> None:
        """Bring the metrics of `rank` up to `values`; names ending in ``_total`` are counters.

        All counters restart with another `pid`; those that are not `TOTALS_OF_PROCESS` also with
        another `epoch`, of which 0 is none.
        """
        self._note_restart(rank, pid, epoch)
        # Imported late: the multi-process directory must be in the environment by then.
        from prometheus_client import Counter, Gauge

        for name, value in values.items():
            is_counter = name.endswith("_total")
            metric = self._metrics.get(name)
            if metric is None:
                full = f"{self._prefix}_{exported(name)[0]}"
                text = HELP.get(name, name.replace("_", " "))
                metric = (
                    Counter(full, text, self._labels)
                    if is_counter
                    else Gauge(full, text, self._labels, multiprocess_mode="mostrecent")
                )
                self._metrics[name] = metric
            if self._labels:
                metric = metric.labels(str(rank))
            factor = exported(name)[1]
            if not is_counter:
                metric.set(value * factor)
                continue
            last = self._last.get((name, rank), 0.0)
            metric.inc((value - last if value >= last else value) * factor)
            self._last[name, rank] = value

    def _note_restart(self, rank: int, pid: str, epoch: int) -> None:
        """Forget what counters that count from zero again had reached.

        Values alone do not tell: those after a restart may be the larger ones.
        """
        last_pid, last_epoch = self._lives.get(rank, (pid, epoch))
        is_other_process, is_other_epoch = pid != last_pid, epoch not in (0, last_epoch)
        self._lives[rank] = pid, epoch or last_epoch
        if is_other_process or is_other_epoch:
            self._last = {
                key: value
                for key, value in self._last.items()
                if key[1] != rank or (not is_other_process and key[0] in TOTALS_OF_PROCESS)
            }


class MetricsPublisher(threading.Thread):
    """Publishes until the process ends.

    `cache_rank_sockets`, by number, are of the engines of this host in processes of their own. They
    have the label ``cache_rank`` if there are several, `num_engines` on all hosts.
    """

    def __init__(
        self,
        own_status: Callable[[], StatusReply],
        cache_rank_sockets: Mapping[int, Path],
        num_engines: int,
    ) -> None:
        super().__init__(name="tandemkv-metrics", daemon=True)
        self._own_status = own_status
        self._sockets = dict(cache_rank_sockets)
        self._inference = MetricGroup("tandemkv_inference")
        label = "cache_rank" if num_engines > 1 else None
        self._cache = MetricGroup("tandemkv_cache", label)
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Copy the values of all ranks every few seconds."""
        while not self._stop_event.wait(_INTERVAL_S):
            try:
                self.publish()
            except Exception:  # values that stand still would look like a healthy server's
                _LOG.exception("metrics are not up to date")

    def publish(self) -> None:
        """Copy the values once."""
        self._inference.update(self._own_status().values)
        for rank, socket in self._sockets.items():
            try:
                reply = request_status(socket, timeout_s=_TIMEOUT_S)
            except TandemKVError:
                continue  # shown as cache_rank_up 0 by the inference rank's own values
            self._cache.update(reply.values, rank, pid=reply.info.get("pid", ""), epoch=reply.epoch)

    def stop(self) -> None:
        """End the thread."""
        self._stop_event.set()
