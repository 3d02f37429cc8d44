# SPDX-License-Identifier: Apache-2.0
"""Kernels of a layer, timed as ``tandemkv plan --measure`` times them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tandemkv.server.plan.measure import LENGTHS, SAMPLES, Timed

from .decode_steps import Point
from .report import Failure, Row

if TYPE_CHECKING:
    from tandemkv.server.plan.device_timings import DeviceTimings

_BATCH = 8
_NO_RATE = ("score_topk", "predict", "fetch")
"""What computes more than it reads, or reads what was not counted."""


def kernel_rows(
    timings: DeviceTimings, progress: Callable[[str], None]
) -> tuple[list[Row], list[Failure]]:
    """Time each kernel, in us and where it reads much in GB/s.

    One that fails, for lack of memory or else, does not keep the others from running.
    """
    rows: list[Row] = []
    failures: list[Failure] = []
    for figure, time_it in _kernels(timings).items():
        progress(figure)
        try:
            timed = time_it()
        except RuntimeError as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            failures.append(Failure(figure, reason))
            continue
        rows.append(Row(f"{figure}_us", timed.us, "us"))
        if not figure.startswith(_NO_RATE):
            rows.append(Row(f"{figure}_bandwidth", timed.bandwidth / 1e9, "GB/s"))
    return rows, failures


def _kernels(timings: DeviceTimings) -> dict[str, Callable[[], Timed]]:
    found: dict[str, Callable[[], Timed]] = {"copy_device": timings.copy}
    for tokens in LENGTHS:
        scanned, attended = (Point(_BATCH, size).label for size in (tokens, tokens // 4))
        for name in ("native", "int8", "int4"):
            found[f"score_keys_{name}_{scanned}"] = partial(timings.scan, name, tokens)
        found[f"score_topk_int4_{scanned}"] = partial(timings.select, tokens)
        found[f"attention_{attended}"] = partial(timings.attention, tokens // 4)
    for count in SAMPLES:
        found[f"attend_samples_{_BATCH}x{count}"] = partial(timings.samples, count)
    return found | {"predict_query": timings.predict, "fetch": timings.gather}
