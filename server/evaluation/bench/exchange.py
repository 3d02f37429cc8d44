# SPDX-License-Identifier: Apache-2.0
"""How long a layer's exchange takes on a cache rank's GPU, by Chrome traces of its steps.

A step is one replayed graph: all of its kernels have the correlation id of the launch. In the order
of their ends, its waiting kernels are one for the step's beginning, one for each selection and one
for the step's end; its raising kernels are one for each selection and one that ends the step.
Selections are served in order, so the n-th of either kind belong together. By streams they cannot
be paired: a trace has those of the graph's executor, which are others than were captured.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tandemkv.cache_rank.protocol.step_trace import TRACE_SUFFIX

from .decode_steps import TRACE_FOLDER, Point
from .report import Row, Spread

_WAIT, _RAISE = "_wait_kernel", "_raise_kernel"
"""Of `tandemkv.kernels.triton_ops.step_flags`, as a trace names them."""


class Exchange(NamedTuple):
    """One layer of one step, in us."""

    taken: float
    """From the end of the kernel that waits for the input to the end of the one that raises."""
    waited: float
    """By that kernel. Short where the input was there before the lane was free, which is not
    counted in `taken`."""


def exchanges(events: Iterable[Mapping[str, Any]]) -> list[Exchange]:
    """Return those of all whole steps among the ``traceEvents`` of a cache rank.

    Steps of another form have none: prompts, steps that select for the next one, layers that share
    a selection, and exact layers, whose attention waits as well.
    """
    ends: dict[str, dict[int, list[tuple[float, float]]]] = {_WAIT: {}, _RAISE: {}}
    for event in events:
        kind = ends.get(event.get("name", ""))
        if kind is not None and event.get("cat") == "kernel":
            end = event["ts"] + event["dur"], event["dur"]
            kind.setdefault(event["args"]["correlation"], []).append(end)
    found = []
    for launch, waits in ends[_WAIT].items():
        inputs, ready = sorted(waits)[1:-1], sorted(ends[_RAISE].get(launch, ()))[:-1]
        pairs = zip(inputs, ready, strict=False)
        step = [Exchange(end - begin, waited) for (begin, waited), (end, _) in pairs]
        if len(inputs) == len(ready) and all(each.taken > 0 for each in step):
            found += step
    return found


def exchange_rows(
    name: str, points: Sequence[Point], folder: Path, progress: Callable[[str], None]
) -> list[Row]:
    """Return ``exchange_us_*`` of a configuration by the traces of its cache ranks in `folder`.

    `progress` is told of points that have none.
    """
    rows = []
    for point in points:
        figure = f"exchange_us_{name}_{point.label}"
        stem = f"decode_{point.batch}x{point.context}_engine*{TRACE_SUFFIX}"
        paths = sorted((folder / TRACE_FOLDER).glob(stem))
        try:
            found = [each for path in paths for each in exchanges(_events(path))]
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
            progress(f"  {figure}: a trace cannot be read ({type(error).__name__}: {error})")
            continue
        if not found:
            why = "no step in them that can be read" if paths else "see the cache rank's log"
            progress(f"  {figure}: none, by {len(paths)} traces of cache ranks; {why}")
            continue
        waited = median(each.waited for each in found)
        note = f"{len(paths)} cache ranks; their lanes had waited for the input {waited:.0f} us"
        rows.append(Row.of(figure, Spread.of([each.taken for each in found]), "us", note=note))
    return rows


def _events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found
