# SPDX-License-Identifier: Apache-2.0
"""Decode steps without their prefill, as a child process: command line and result.

``tandemkv.inference_rank.decode_bench`` fills SGLang's pool with random K/V and runs only decode,
through the model runner and its CUDA graph, for stock SGLang's backend as for ours. It needs a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandemkv.server.evaluation.provenance import BenchError
from tandemkv.server.evaluation.spread import Spread

from .measured import Measured, Point

MODULE = "tandemkv.inference_rank.decode_bench"
RESULT_FILE = "decode_steps.json"
TRACE_FOLDER = "traces"
_SPREADS = ("waited_ms", "queued_ms")


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
    """Read the result file, which is rewritten after each point.

    Returns
    -------
    measured, failed : list of Measured, dict of Point to str
        A point that is in neither was not reached.

    Raises
    ------
    BenchError
        If the file is not of the expected form.
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
    return tuple(sorted((folder / TRACE_FOLDER).glob("*.json.gz")))
