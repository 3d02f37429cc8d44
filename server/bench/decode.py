# SPDX-License-Identifier: Apache-2.0
"""Decode time per token, stock SGLang beside ours, each in a child process on the same GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.plan.shape import ModelShape

from .configurations import Configuration
from .one_batch import (
    RESULT_FILE,
    Measured,
    Point,
    capacity_tokens,
    one_batch_argv,
    parse_output,
    trace_files,
    write_driver,
    write_model_config,
)
from .report import Failure, Row
from .timing import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """What to measure. `prefill_chunk` is in tokens of the whole batch, 0 for all at once."""

    shape: ModelShape
    tokenizer_dir: Path
    points: tuple[Point, ...]
    configurations: Mapping[str, Configuration]
    work_dir: Path
    output_tokens: int = 32
    prefill_chunk: int = 16384
    profile: bool = False
    timeout_s: float = 1800.0
    model_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """Rows, what could not be measured, and Chrome traces by configuration."""

    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    traces: Mapping[str, tuple[Path, ...]]


def run_decode(
    run: DecodeRun, progress: Callable[[str], None], *, headline: str | None = None
) -> DecodeResult:
    """Run every configuration at every point; a run that fails does not end the others.

    Parameters
    ----------
    run : DecodeRun
        What to measure.
    progress : callable
        Told what is running.
    headline : str, optional
        The configuration whose ratios get the short names, default the first that is no
        reference.

    Raises
    ------
    SettingsError
        Before anything is run: if a configuration has settings that this version refuses, or
        `headline` is not one of ours.
    """
    check_headline(run.configurations, headline)
    model_dir = run.model_dir or run.work_dir / "model"
    if run.model_dir is None:
        longest = max(point.context for point in run.points) + run.output_tokens
        write_model_config(run.shape, model_dir, max_context=longest)
    for configuration in run.configurations.values():
        configuration.serve_settings(model_dir=model_dir, capacity_tokens=1 << 20, batch=1)
    measured: dict[tuple[str, Point], Measured] = {}
    failures: list[Failure] = []
    traces: dict[str, tuple[Path, ...]] = {}
    batches = [
        (batch, list(points))
        for batch, points in groupby(sorted(run.points), key=lambda point: point.batch)
    ]
    for name, configuration in run.configurations.items():
        for batch, points in batches:
            progress(f"{name}: {', '.join(point.label for point in points)}")
            output = _run_child(run, name, configuration, batch, points, model_dir)
            for item in output.measured:
                measured[name, item.point] = item
            failures += output.failures
            traces[name] = traces.get(name, ()) + output.traces
    rows = decode_rows(measured) + ratio_rows(measured, run.configurations, headline=headline)
    return DecodeResult(rows=tuple(rows), failures=tuple(failures), traces=traces)


def check_headline(configurations: Mapping[str, Configuration], headline: str | None) -> None:
    """Refuse a headline that is a reference or is not run.

    Raises
    ------
    SettingsError
        Naming those that can be one.
    """
    own = [name for name, item in configurations.items() if not item.is_reference]
    if headline is not None and headline not in own:
        raise SettingsError(
            f"headline={headline}: not a configuration of ours that is run; "
            f"there is {', '.join(own) or 'none'}"
        )


def decode_rows(measured: Mapping[tuple[str, Point], Measured]) -> list[Row]:
    """Return ``tpot_ms_*`` and ``prefill_s_*`` of each configuration and point."""
    rows = []
    for (name, point), item in measured.items():
        rows.append(
            Row(
                figure=f"tpot_ms_{name}_{point.label}",
                value=item.median_s * 1e3,
                unit="ms",
                p10=percentile(item.steps_s, 0.1) * 1e3,
                p90=percentile(item.steps_s, 0.9) * 1e3,
                n=len(item.steps_s),
            )
        )
        rows.append(
            Row(figure=f"prefill_s_{name}_{point.label}", value=item.prefill_s, unit="s", n=1)
        )
    return rows


def ratio_rows(
    measured: Mapping[tuple[str, Point], Measured],
    configurations: Mapping[str, Configuration],
    *,
    headline: str | None = None,
) -> list[Row]:
    """Return the time of ours divided by that of each reference at the same point.

    Below 1 ours is faster. ``tpot_ratio_<ours>_vs_<reference>_<point>`` for every pair, and
    ``tpot_ratio_vs_tp2_<point>`` of `headline` against ``dense-tp2``.
    """
    own = [name for name, item in configurations.items() if not item.is_reference]
    headline = headline or next(iter(own), None)
    rows = []
    for name, point in measured:
        if name not in own:
            continue
        for reference in configurations:
            other = measured.get((reference, point))
            if reference in own or other is None:
                continue
            ratio = measured[name, point].median_s / other.median_s
            note = f"{name} / {reference}, medians of one run; below 1 {name} is faster"
            label = f"{name}_vs_{reference}_{point.label}"
            rows.append(Row(figure=f"tpot_ratio_{label}", value=ratio, unit="", note=note))
            if name == headline:
                short = f"tpot_ratio_vs_{reference.removeprefix('dense-')}_{point.label}"
                rows.append(Row(figure=short, value=ratio, unit="", note=note))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChildOutput:
    measured: list[Measured]
    failures: list[Failure]
    traces: tuple[Path, ...]


def _run_child(
    run: DecodeRun,
    name: str,
    configuration: Configuration,
    batch: int,
    points: list[Point],
    model_dir: Path,
) -> _ChildOutput:
    folder = run.work_dir / f"{name}_batch{batch}"
    folder.mkdir(parents=True, exist_ok=True)
    write_driver(folder)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    contexts = [point.context for point in points]
    capacity = capacity_tokens(batch, contexts, run.output_tokens)
    argv = one_batch_argv(
        work_dir=folder,
        model_dir=model_dir,
        tokenizer_dir=run.tokenizer_dir,
        batch=batch,
        contexts=contexts,
        output_tokens=run.output_tokens,
        flags=configuration.sglang_flags(
            model_dir=model_dir, capacity_tokens=capacity, batch=batch
        ),
        profile=run.profile,
    )
    run_dir = RunDir.create()
    try:
        env = configuration.child_env(
            model_dir=model_dir, run_dir=run_dir.path, capacity_tokens=capacity, batch=batch
        )
        env["BENCH_PREFILL_CHUNK"] = str(run.prefill_chunk)
        env["SGLANG_TORCH_PROFILER_DIR"] = str(folder)
        status = _wait(argv, env, folder, run.timeout_s)
    finally:
        run_dir.remove()
    text = (folder / "stdout.log").read_text(encoding="utf-8", errors="replace")
    result = folder / RESULT_FILE
    jsonl = result.read_text(encoding="utf-8") if result.exists() else ""
    measured, skipped = parse_output(text, points, jsonl)
    reached = {item.point for item in measured}
    failures = []
    for point in points:
        if point not in reached:
            reason = skipped.get(point) or f"{status}: {_last_error(folder / 'stderr.log')}"
            failures.append(Failure(f"tpot_ms_{name}_{point.label}", reason))
    return _ChildOutput(measured=measured, failures=failures, traces=trace_files(text))


def _wait(argv: Sequence[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> str:
    """Run a child in a process group of its own and return how it ended; never leave it behind."""
    with (
        (folder / "stdout.log").open("wb") as out,
        (folder / "stderr.log").open("wb") as err,
        subprocess.Popen(
            list(argv), env=dict(env), stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            cwd=folder, start_new_session=True,
        ) as child,
    ):  # fmt: skip
        try:
            return f"exit code {child.wait(timeout=timeout_s)}"
        except subprocess.TimeoutExpired:
            return f"no result within {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def run_child(argv: Sequence[str], folder: Path, timeout_s: float) -> tuple[str, str]:
    """Run a child with our own environment; return how it ended and its last error."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    status = _wait(argv, env, folder, timeout_s)
    return status, _last_error(folder / "stderr.log")


def _last_error(log: Path) -> str:
    """Return the last line of a log that names an exception, without paths."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    named = [line for line in lines if "Error" in line.partition(":")[0]]
    text = (named or lines or ["no output"])[-1]
    words = (Path(word).name if word.startswith("/") else word for word in text.split())
    return " ".join(words)[:300]
