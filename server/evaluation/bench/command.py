# SPDX-License-Identifier: Apache-2.0
"""``tandemkv bench``: each subcommand writes one report as JSON."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.token_count import read_token_count
from tandemkv.server.evaluation import provenance
from tandemkv.server.evaluation.provenance import BenchError, Gpu
from tandemkv.server.evaluation.request_options import option, takes
from tandemkv.server.evaluation.result_file import check_result_file

from .decode_steps import Point
from .report import Failure, OutOption, Report, Row, make_report, write_report
from .serving import ServeLoad, bench_serving_argv, serving_rows

bench_app = typer.Typer(no_args_is_help=True, help="Measure, and write reports as JSON.")
_POINT = re.compile(r"(\d{1,6})x(\d{1,9}[km]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """Options of ``bench decode``."""

    points: Annotated[str, option("Batch x context, e.g. 1x8k,8x8k,8x64k.")] = (
        "1x8k,1x64k,8x8k,8x64k"
    )
    config: Annotated[
        list[str] | None,
        option(
            "Configuration to run; may be repeated. Default: dense-tp1, and without --grid "
            "in-process-tp1."
        ),
    ] = None
    configurations: Annotated[
        Path | None, option("YAML with more configurations.", metavar="FILE")
    ] = None
    grid: Annotated[
        Path | None,
        option("YAML of settings to time on one GPU, as for `quality --grid`.", metavar="FILE"),
    ] = None
    headline: Annotated[
        str | None,
        option(
            "Configuration whose ratio to dense-tp2 is named tpot_ratio_vs_tp2_*. "
            "Default: the first of ours."
        ),
    ] = None
    shape: Annotated[str, option("Built-in shape, run with dummy weights.")] = "qwen3-8b"
    model: Annotated[
        Path | None, option("Model directory whose config.json is used instead of --shape.")
    ] = None
    tokenizer: Annotated[str, option("Directory with any tokenizer, or smollm2.")] = "smollm2"
    output_tokens: Annotated[int, option("Tokens decoded in each run.", min=3)] = 32
    timeout_s: Annotated[float, option("Longest run of one child.", min=1)] = 1800.0
    profile: Annotated[
        bool,
        option(
            "Save Chrome traces of three decode steps, of cache ranks by link shared as well; of "
            "these exchange_us_*, how long a layer's exchange takes.",
            "--profile",
        ),
    ] = False
    work_dir: Annotated[Path | None, option("Folder to keep logs and traces in.")] = None
    out: OutOption = None


@bench_app.command()
@takes(DecodeRequest)
def decode(request: DecodeRequest) -> None:
    """Time decode steps: stock SGLang beside ours, one child process after the other.

    Exit code 1 if a figure that was asked for is missing.
    """
    from tandemkv.server.checks.preflight import resolve_model
    from tandemkv.server.plan.shape import find_config

    from .configurations import from_grid, load_configurations, pick
    from .decode import DecodeRun, run_decode, write_model_config

    check_result_file(_path("decode", request.out), "--out")
    if request.profile and request.work_dir is None:
        raise SettingsError("--profile needs --work-dir, where the traces are to stay")
    console = _console()
    table, model = load_configurations(request.configurations), request.model
    names = list(request.config or ["dense-tp1", *([] if request.grid else ["in-process-tp1"])])
    if request.grid is not None:
        of_grid = from_grid(request.grid)
        table |= of_grid
        names += of_grid
    chosen = pick(table, names)
    with _folder(request.work_dir) as folder:
        points, config = parse_points(request.points), find_config(str(model or request.shape))
        model_dir = folder / "model" if model is None else model.resolve()
        if model is None:
            longest = max(point.context for point in points) + 5 * request.output_tokens
            write_model_config(config, model_dir, max_context=longest)
        run = DecodeRun(
            model_dir=model_dir,
            tokenizer_dir=resolve_model(request.tokenizer, lambda _: None),
            points=points,
            configurations=chosen,
            work_dir=folder,
            output_tokens=request.output_tokens,
            profile=request.profile,
            timeout_s=request.timeout_s,
        )
        gpu = _require_gpu(provenance.query_gpu())
        result = run_decode(
            run,
            console.print,
            headline=request.headline,
            keep=lambda found: _write("decode", found.rows, found.failures, gpu, request.out),
        )
    for name, traces in result.traces.items():
        for trace in traces:
            console.print(f"Chrome trace of {name}: {trace}", soft_wrap=True)
    _finish("decode", result.rows, result.failures, gpu, request.out, console)


@bench_app.command()
def kernels(out: OutOption = None) -> None:
    """Time the kernels of a layer on the GPU, as `plan --measure` does."""
    from tandemkv.server.plan.constants import timings_here

    from .kernels import kernel_rows

    gpu = _require_gpu(provenance.visible_gpu())
    check_result_file(_path("kernels", out), "--out")
    console = _console()
    rows, failures = kernel_rows(timings_here(), console.print)
    _finish("kernels", rows, failures, gpu, out, console)


@bench_app.command()
@takes(ServeLoad)
def serve(load: ServeLoad) -> None:
    """Put a running server on this machine under load, with sglang.bench_serving."""
    from tandemkv.server.checks.preflight import resolve_model

    from .decode import run_child

    check_result_file(_path("serve", load.out), "--out")
    tokenizer_dir = resolve_model(load.tokenizer, lambda _: None)
    if find_spec("datasets") is None:
        raise SettingsError(
            "sglang.bench_serving needs the package datasets, which is not installed; "
            "`pip install datasets`"
        )
    console = _console()
    with _folder(None) as folder:
        result = folder / "serving.jsonl"
        console.print(f"{load.requests} requests to {load.url}")
        argv = bench_serving_argv(load, tokenizer_dir, result)
        status, detail = run_child(argv, folder, load.timeout_s)
        if not result.exists():
            raise BenchError(f"bench_serving gave no result, {status}: {detail}")
        rows, failures = serving_rows(load, result.read_text(encoding="utf-8"))
    _finish("serve", rows, failures, provenance.query_gpu(), load.out, console)


@bench_app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Reports of `bench decode`.")],
    out: Annotated[Path, option("Path without suffix.", metavar="STEM")] = Path("tpot"),
    config: Annotated[
        list[str] | None, option("Configuration to draw; may be repeated. Default: all.")
    ] = None,
    batch: Annotated[int | None, option("Batch to draw. Default: all.", min=1)] = None,
) -> None:
    """Draw time per token against context as SVG and PNG; needs the extra `bench`."""
    from .plot import draw
    from .report import read_report

    for path in draw([read_report(file) for file in files], out, config or (), batch):
        typer.echo(str(path))


def parse_points(text: str) -> tuple[Point, ...]:
    """Read e.g. ``1x8k,8x65536``.

    Raises `SettingsError` if a point is not of that form, or given twice.
    """
    points = []
    for item in text.split(","):
        match = _POINT.fullmatch(item.strip())
        point = Point(*(int(read_token_count(part)) for part in match.groups())) if match else None
        if point is None or point.batch < 1 or point.context < 1:
            raise SettingsError(f"--points {item}: batch x context is required, e.g. 8x64k")
        if point in points:
            raise SettingsError(f"--points {item}: given twice")
        points.append(point)
    return tuple(points)


def _require_gpu(gpu: Gpu | None) -> Gpu:
    if gpu is None:
        raise SettingsError(
            "this benchmark times GPU work and no GPU is visible; run it on one, or let "
            "`tandemkv plan` predict"
        )
    return gpu


def _finish(
    name: str,
    rows: Sequence[Row],
    failures: Sequence[Failure],
    gpu: Gpu | None,
    out: Path | None,
    console: Console,
) -> None:
    """Write and show a report; exit with 1 if a figure is missing."""
    report, path = _write(name, rows, failures, gpu, out)
    for row in report.rows:
        spread = f" ({row.p10:.4g} to {row.p90:.4g})" if row.p10 is not None and row.p90 else ""
        text = f"{row.figure}: {row.value:.4g} {row.unit}{spread}"
        console.print(text, soft_wrap=True)
    for failure in report.failures:
        text = f"{failure.figure}: missing, {failure.reason}"
        console.print(text, soft_wrap=True, style="red")
    typer.echo(str(path))
    if report.failures or not report.rows:
        raise typer.Exit(1)


def _write(
    name: str, rows: Sequence[Row], failures: Sequence[Failure], gpu: Gpu | None, out: Path | None
) -> tuple[Report, Path]:
    command = provenance.own_command()
    report = make_report(name, rows, command=command, failures=failures, gpu=gpu)
    path = _path(name, out)
    write_report(report, path)
    return report, path


def _path(name: str, out: Path | None) -> Path:
    return out or Path(f"{name}.json")


def _console() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tandemkv-bench-") as name:
        yield Path(name)
