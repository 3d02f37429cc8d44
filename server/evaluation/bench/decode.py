# SPDX-License-Identifier: Apache-2.0
"""Decode time per token, stock SGLang beside ours, each in a child process on the same GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.index_channels import (
    indexed_layers,
    write_index_channels,
)
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.step_trace import TRACE_VARIABLE
from tandemkv.inference_rank.sglang.versions import RUN_ON_GPU
from tandemkv.server.evaluation.provenance import version_of
from tandemkv.server.launch.cache_rank_launch import SETTINGS_FILE, cache_rank_launches
from tandemkv.server.launch.child_process import ChildProcess, ChildSpec, watched
from tandemkv.server.launch.launcher import CacheRankLaunch
from tandemkv.server.launch.message_launch import message_launches, with_own_link
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import to_yaml

from . import decode_steps
from .configurations import Configuration
from .decode_steps import Measured, Point, capacity_tokens
from .exchange import exchange_rows
from .report import Failure, Row

_TICK_S, _TAIL_LINES = 0.1, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """What to measure."""

    model_dir: Path
    tokenizer_dir: Path
    points: tuple[Point, ...]
    configurations: Mapping[str, Configuration]
    work_dir: Path
    output_tokens: int = 32
    profile: bool = False
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """Rows, what could not be measured, and Chrome traces by configuration."""

    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    traces: Mapping[str, tuple[Path, ...]]


def run_decode(
    run: DecodeRun,
    progress: Callable[[str], None],
    *,
    headline: str | None = None,
    keep: Callable[[DecodeResult], object] = lambda _: None,
) -> DecodeResult:
    """Run every configuration at every point; a run that fails does not end the others.

    The ratios of `headline`, by default the first that is no reference, get the short names. `keep`
    is given the result so far after each configuration, so that an interrupted run has a report.
    Raises `SettingsError`, before anything is run: if a configuration has settings that this
    version refuses, or `headline` is not one of ours, or SGLang is one whose insides the driver
    does not know.
    """
    check_sglang(version_of("sglang"))
    own = [name for name, item in run.configurations.items() if not item.is_reference]
    if headline is not None and headline not in own:
        raise SettingsError(
            f"headline={headline}: not a configuration of ours that is run; "
            f"there is {', '.join(own) or 'none'}"
        )
    listed = {
        name: with_channels(item, run.model_dir, run.work_dir)
        for name, item in run.configurations.items()
    }
    run = replace(run, configurations=listed)
    for configuration in run.configurations.values():
        configuration.serve_settings(model_dir=run.model_dir, capacity_tokens=1 << 20, batch=1)
    measured: dict[tuple[str, Point], Measured] = {}
    failures: list[Failure] = []
    traces: dict[str, tuple[Path, ...]] = {}
    taken: list[Row] = []
    batches = [list(points) for _, points in groupby(sorted(run.points), key=lambda p: p.batch)]
    for name, configuration in run.configurations.items():
        for points in batches:
            progress(f"{name}: {', '.join(point.label for point in points)}")
            folder = run.work_dir / f"{name}_batch{points[0].batch}"
            found, failed = _run_child(run, name, points, folder)
            for item in found:
                measured[name, item.point] = item
                progress(f"  {item.point.label}: {item.queued.median:.2f} ms a step")
            for failure in failed:
                progress(f"  {failure.figure}: {failure.reason}")
            failures += failed
            traces[name] = traces.get(name, ()) + decode_steps.trace_files(folder)
            if run.profile and configuration.has_cache_gpu:
                taken += exchange_rows(name, [item.point for item in found], folder, progress)
        ratios = ratio_rows(measured, run.configurations, headline=headline)
        rows = (*decode_rows(measured), *taken, *ratios)
        result = DecodeResult(rows=rows, failures=tuple(failures), traces=dict(traces))
        keep(result)
    return result


def check_sglang(version: str | None) -> None:
    """Refuse versions of SGLang that the driver was not written for: it uses private parts.

    Raises `SettingsError`, with the version to install.
    """
    if version not in RUN_ON_GPU:
        raise SettingsError(
            f"sglang=={version}: `bench decode` drives SGLang's model runner as {RUN_ON_GPU[0]} "
            f"has it; install sglang=={RUN_ON_GPU[0]} for this command"
        )


def decode_rows(measured: Mapping[tuple[str, Point], Measured]) -> list[Row]:
    """Return ``tpot_ms_*`` and ``queued_tpot_ms_*`` of what was measured."""
    rows = []
    for (name, point), item in measured.items():
        label, note = f"{name}_{point.label}", "; ".join(item.devices)
        rows.append(Row.of(f"tpot_ms_{label}", item.waited, "ms", note=note))
        rows.append(Row.of(f"queued_tpot_ms_{label}", item.queued, "ms", note=note))
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
    for (name, point), ours in measured.items():
        for reference in configurations:
            theirs = measured.get((reference, point))
            if name not in own or reference in own or theirs is None:
                continue
            note = f"{name} / {reference}, medians of one run; below 1 {name} is faster"
            figures = [f"{name}_vs_{reference}"]
            if name == headline:
                figures.append(f"vs_{reference.removeprefix('dense-')}")
            for kind, ratio in (
                ("tpot_ratio", ours.waited.median / theirs.waited.median),
                ("queued_tpot_ratio", ours.queued.median / theirs.queued.median),
            ):
                names = [f"{kind}_{figure}_{point.label}" for figure in figures]
                rows += [Row(figure=each, value=ratio, unit="", note=note) for each in names]
    return rows


def write_model_config(config: Mapping[str, Any], model_dir: Path, *, max_context: int) -> None:
    """Write a model directory of a ``config.json`` that dummy weights can be loaded for.

    `max_context` has the output included, and is rounded up to a power of two.
    """
    longest = 1 << max(7, (max_context - 1).bit_length())
    model_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**config, "max_position_embeddings": longest}, indent=2)
    (model_dir / "config.json").write_text(text, encoding="utf-8")


def with_channels(item: Configuration, model_dir: Path, folder: Path) -> Configuration:
    """Return a configuration with a file of as many channels as it says an index has.

    They are the first ones: which ones they are makes no difference to the time.
    """
    count = item.index_channels
    if count is None:
        return item
    import torch

    spec = read_model_spec(model_dir, dtype="bfloat16")
    path, first = folder / f"channels-{count}.safetensors", torch.arange(count)
    layers = dict.fromkeys(indexed_layers(spec), first.expand(spec.num_kv_heads, -1))
    write_index_channels(path, spec, layers, {})
    settings = {**item.settings, "selection.index_channels": str(path)}
    return item.model_copy(update={"settings": settings})


def _run_child(
    run: DecodeRun, name: str, points: list[Point], folder: Path
) -> tuple[list[Measured], list[Failure]]:
    configuration, batch = run.configurations[name], points[0].batch
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / decode_steps.RESULT_FILE
    traces = folder / decode_steps.TRACE_FOLDER
    for old in (result, *(traces.glob("*") if run.profile else ())):
        old.unlink(missing_ok=True)
    capacity = capacity_tokens(batch, [point.context for point in points], run.output_tokens)
    settings = configuration.serve_settings(
        model_dir=run.model_dir, capacity_tokens=capacity, batch=batch
    )
    argv = decode_steps.decode_steps_argv(
        work_dir=folder,
        model_dir=run.model_dir,
        tokenizer_dir=run.tokenizer_dir,
        points=points,
        steps=run.output_tokens,
        capacity=capacity,
        flags=configuration.sglang_flags(settings),
        profile=run.profile,
    )
    run_dir = RunDir.create()
    try:
        with contextlib.ExitStack() as beside:
            if not configuration.is_stock:
                to = traces if run.profile else None
                beside.enter_context(cache_rank_beside(settings, run_dir, folder, to))
            env = configuration.child_env(settings, run_dir.path)
            status, error = run_child(argv, folder, run.timeout_s, env)
    except SettingsError as why:  # the other configurations can still be measured
        return [], [_failure(name, point, str(why)) for point in points]
    finally:
        run_dir.remove()
    text = result.read_text(encoding="utf-8") if result.exists() else ""
    measured, failed = decode_steps.parse_result(text, points)
    missing = [point for point in points if point not in {item.point for item in measured}]
    reason = f"{status}: {error}"
    return measured, [_failure(name, point, failed.get(point) or reason) for point in missing]


def _failure(name: str, point: Point, reason: str) -> Failure:
    return Failure(f"tpot_ms_{name}_{point.label}", reason)


def run_child(
    argv: Sequence[str], folder: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run a child, by default with our own environment; return how it ended and its last error.

    Its output goes to ``child.log`` in `folder`.
    """
    env = env or {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    spec = ChildSpec(name="child", argv=tuple(argv), env=env, log_path=folder / "child.log")
    deadline = time.monotonic() + timeout_s
    with watched(spec) as child:
        while (status := child.exit_status()) is None and time.monotonic() < deadline:
            time.sleep(_TICK_S)
    return status or f"no result within {timeout_s:g} s", _last_error(child.log_tail(_TAIL_LINES))


def _last_error(log: str) -> str:
    """Return the last line of a log that names an exception, without paths."""
    lines = log.splitlines()
    named = [line for line in lines if "Error" in line.partition(":")[0]]
    words = (named or lines)[-1].split()
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)[:300]


_START_TIMEOUT_S = 120.0


@contextlib.contextmanager
def cache_rank_beside(
    settings: ServeSettings, run_dir: RunDir, folder: Path, traces: Path | None = None
) -> Iterator[None]:
    """Run the cache ranks of `settings` during the body; nothing if it is in the same process.

    Their output goes to `folder`: ``cache_rank.log``, of several ``cache_rank_0.log`` and so on; by
    messages ``cache_rank.log``, ``cache_rank_1.log``, and of their pumps ``pump.log``,
    ``pump_1.log``. By link `shared` they trace steps into the folder `traces`, if it is given, when
    the benchmark asks for that (`tandemkv.cache_rank.protocol.step_trace`). Raises `SettingsError`
    if one ends, or does not answer in time.
    """
    is_far = settings.rank_settings.placement.has_far_host
    if is_far:
        settings = with_own_link(settings, run_dir)
        launches = message_launches(settings, run_dir, is_far_here=True)
    else:  # decided settings, as `serve` hands them over
        placement = settings.rank_settings.placement
        settings = settings.model_copy(update={"placement": placement})
        launches = cache_rank_launches(settings, run_dir)
    if not launches:
        yield
        return
    if settings.tensor_parallel > 1:
        raise SettingsError(
            f"{settings.rank_settings.placement.num_engines} engines are not measured here; use "
            "cache_ranks 0, or tensor_parallel 1"
        )
    (run_dir.path / SETTINGS_FILE).write_text(to_yaml(settings), encoding="utf-8")
    with contextlib.ExitStack() as running:
        started = []
        for launch in launches:  # by messages a pump as well, and its cache rank first
            assert launch.spec is not None
            name = f"{launch.spec.name.replace(' ', '_')}.log"
            env = {} if traces is None or is_far else {TRACE_VARIABLE: str(traces)}
            spec = replace(launch.spec, log_path=folder / name, env={**launch.spec.env, **env})
            child = running.enter_context(watched(spec))
            started.append((launch, child))
            if is_far:
                _await(launch, child)
        for launch, child in started:
            _await(launch, child)
        yield


def _await(launch: CacheRankLaunch, child: ChildProcess) -> None:
    reason = child.await_ready(launch.detail, _START_TIMEOUT_S)
    if reason is not None:
        raise SettingsError(f"{reason}: {child.log_tail(1)[:300]}")
