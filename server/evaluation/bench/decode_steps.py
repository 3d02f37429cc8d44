# SPDX-License-Identifier: Apache-2.0
"""Decode steps without their prefill, as a child process: command line and result.

``tandemkv.inference_rank.decode_bench`` fills SGLang's pool with random K/V and runs only decode,
through the model runner and its CUDA graph, for stock SGLang's backend as for ours. It needs a GPU.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandemkv.cache_rank.protocol.step_trace import TRACE_SUFFIX
from tandemkv.server.evaluation.provenance import BenchError
from tandemkv.server.plan.pages import LONG_PAGE_TOKENS

from .report import Report, Row, Spread

MODULE = "tandemkv.inference_rank.decode_bench"
RESULT_FILE = "decode_steps.json"
TRACE_FOLDER = "traces"
_FIGURE = re.compile(
    r"(?P<queued>queued_)?tpot_ms_(?P<name>.+)_(?P<batch>\d+)x(?P<context>\d+)(?P<kilo>k?)"
)
_SPREADS = ("waited_ms", "queued_ms")


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A batch of requests of one context length."""

    batch: int
    context: int

    @property
    def label(self) -> str:
        """Return e.g. ``8x64k``; contexts that are no multiple of 1024 in full."""
        whole, rest = divmod(self.context, 1024)
        return f"{self.batch}x{self.context if rest else f'{whole}k'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Decode steps of one point, in ms.

    `waited` are steps each of which was waited for; `queued` steps that were queued one behind
    another, as SGLang's overlap scheduler runs them. `devices` are the GPUs that worked, by name.
    """

    point: Point
    waited: Spread
    queued: Spread
    devices: tuple[str, ...] = ()


class StepRow(NamedTuple):
    """The time of a decode step in a report, by what it is named."""

    is_queued: bool
    name: str
    """Of the configuration."""
    point: Point
    row: Row


def step_rows(report: Report) -> list[StepRow]:
    """Return the ``tpot_ms_*`` and ``queued_tpot_ms_*`` of a report."""
    found = []
    for row in report.rows:
        match = _FIGURE.fullmatch(row.figure)
        if match is not None:
            context = int(match["context"]) * (1024 if match["kilo"] else 1)
            point = Point(int(match["batch"]), context)
            found.append(StepRow(bool(match["queued"]), match["name"], point, row))
    return found


def capacity_tokens(batch: int, contexts: Sequence[int], steps: int) -> int:
    """Return the KV capacity of a run: whole pages for each request, and one more.

    Room for five times `steps`: the driver warms up, waits for each step once, and queues them
    three times.
    """
    pages = -(-(max(contexts) + 5 * steps) // LONG_PAGE_TOKENS) + 1
    return batch * pages * LONG_PAGE_TOKENS


def decode_steps_argv(
    *,
    work_dir: Path,
    model_dir: Path,
    tokenizer_dir: Path,
    points: Sequence[Point],
    steps: int,
    capacity: int,
    flags: Sequence[str],
    profile: bool = False,
) -> tuple[str, ...]:
    """Return the command line of one run: points of one batch size.

    `flags` are SGLang's own and come last, so that a configuration has the last word.
    """
    batch = str(points[0].batch)
    argv = [
        sys.executable, "-P", "-m", MODULE,
        "--points", ",".join(f"{point.batch}x{point.context}" for point in points),
        "--steps", str(steps),
        "--out", str(work_dir / RESULT_FILE),
        "--model-path", str(model_dir),
        "--tokenizer-path", str(tokenizer_dir),
        "--load-format", "dummy",
        "--max-total-tokens", str(capacity),
        "--max-running-requests", batch,
        "--cuda-graph-bs", batch,
        "--cuda-graph-backend-prefill", "disabled",
        "--mem-fraction-static", "0.9",
        "--disable-radix-cache",
        "--sampling-backend", "pytorch",
        "--log-level", "warning",
    ]  # fmt: skip
    if profile:
        argv += ["--trace", str(work_dir / TRACE_FOLDER)]
    return (*argv, *flags)


def parse_result(text: str, points: Sequence[Point]) -> tuple[list[Measured], dict[Point, str]]:
    """Return what was measured and what failed, by a result file that is rewritten at each point.

    A point that is in neither was not reached. Raises `BenchError` if the file is not of the
    expected form.
    """
    measured: list[Measured] = []
    failed: dict[Point, str] = {}
    if not text:
        return measured, failed
    try:
        for item in json.loads(text):
            point = Point(int(item["batch"]), int(item["context"]))
            if point not in points:
                raise BenchError(f"{MODULE} reports {point.label}, which was not asked for")
            if "error" in item:
                failed[point] = str(item["error"])
                continue
            waited, queued = (msgspec.convert(item[key], Spread) for key in _SPREADS)
            devices = tuple(str(name) for name in item.get("devices", ()))
            measured.append(Measured(point=point, waited=waited, queued=queued, devices=devices))
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise BenchError(f"{MODULE} wrote a result that lacks {error}; report it") from error
    return measured, failed


def trace_files(folder: Path) -> tuple[Path, ...]:
    """Return where Chrome traces were saved."""
    return tuple(sorted((folder / TRACE_FOLDER).glob(f"*{TRACE_SUFFIX}")))
