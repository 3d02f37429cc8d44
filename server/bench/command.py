# SPDX-License-Identifier: Apache-2.0
"""``tandemkv bench``: each subcommand writes one report as JSON."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.token_count import read_token_count

from .measured import Point
from .report import BenchError, Failure, Report, Row, make_report, write_report

bench_app = typer.Typer(no_args_is_help=True, help="Measure, and write reports as JSON.")
DEFAULT_FOLDER = Path("docs/benchmarks")
_POINT = re.compile(r"(\d{1,6})x(\d{1,9}[km]?)", re.IGNORECASE)

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Default docs/benchmarks/<name>.json.")
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", help="Benchmark to run; may be repeated.")
]


@bench_app.command()
def decode(
    points: Annotated[
        str, typer.Option("--points", help="Batch x context, e.g. 1x8k,8x8k,8x64k.")
    ] = "1x8k,1x64k,8x8k,8x64k",
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help="Configuration to run, in order; may be repeated."),
    ] = None,
    configurations: Annotated[
        Path | None,
        typer.Option("--configurations", metavar="FILE", help="YAML with more configurations."),
    ] = None,
    headline: Annotated[
        str | None, typer.Option("--headline", help="Whose ratios get the short names.")
    ] = None,
    shape: Annotated[
        str, typer.Option("--shape", help="Built-in shape, run with dummy weights.")
    ] = "qwen3-8b",
    model: Annotated[
        Path | None, typer.Option("--model", help="Model directory whose config is used instead.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Directory with any tokenizer, or smollm2.")
    ] = "smollm2",
    driver: Annotated[
        Literal["steps", "one-batch"],
        typer.Option("--driver", help="Decode alone, or SGLang's one_batch with its prefill."),
    ] = "steps",
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=3, help="Tokens decoded in each run.")
    ] = 32,
    prefill_chunk: Annotated[
        int,
        typer.Option("--prefill-chunk", min=0, help="one-batch: prompt tokens per pass; 0: all."),
    ] = 16384,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Longest run of one child.")
    ] = 1800.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Save Chrome traces of three decode steps.")
    ] = False,
    work_dir: Annotated[
        Path | None, typer.Option("--work-dir", help="Keep logs and traces here.")
    ] = None,
    out: OutOption = None,
) -> None:
    """Time decode steps: stock SGLang beside ours, one child process after the other.

    Exit code 1 if a figure that was asked for is missing.
    """
    from tandemkv.server.plan.shape import find_shape
    from tandemkv.server.preflight import resolve_model

    from .configurations import load_configurations, pick
    from .decode import DecodeRun, run_decode
    from .gpu_query import query_gpu

    if profile and work_dir is None:
        raise SettingsError("--profile needs --work-dir, where the traces are to stay")
    console = _console()
    chosen = pick(load_configurations(configurations), config or ["dense-tp1", "in-process-tp1"])
    with _folder(work_dir) as folder:
        run = DecodeRun(
            shape=find_shape(str(model) if model is not None else shape),
            tokenizer_dir=resolve_model(tokenizer, lambda _: None),
            points=parse_points(points),
            configurations=chosen,
            work_dir=folder,
            driver=driver,
            output_tokens=output_tokens,
            prefill_chunk=prefill_chunk,
            profile=profile,
            timeout_s=timeout_s,
            model_dir=model.resolve() if model is not None else None,
        )
        gpu = query_gpu()
        if gpu is None:
            raise SettingsError(
                "this benchmark times GPU work and no GPU is visible; run it on one, or let "
                "`tandemkv plan` predict"
            )
        result = run_decode(run, console.print, headline=headline)
    report = make_report(
        "decode", result.rows, command=_command(), failures=result.failures, gpu=gpu
    )
    for name, traces in result.traces.items():
        for trace in traces:
            console.print(f"Chrome trace of {name}: {trace}", soft_wrap=True)
    _finish(report, out, console)


@bench_app.command()
def kernels(only: OnlyOption = None, out: OutOption = None) -> None:
    """Time kernels on the GPU, under CUDA graphs with rotating buffers."""
    _run_suite("kernels", only or [], out)


@bench_app.command()
def serve(
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", help="Directory with the served model's tokenizer, or smollm2."
        ),
    ],
    url: Annotated[
        str, typer.Option("--url", help="Server on this machine.")
    ] = "http://127.0.0.1:30000",
    name: Annotated[str, typer.Option("--name", help="Part of the rows' names.")] = "serve",
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1)] = 4096,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2)] = 128,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 8,
    requests: Annotated[int, typer.Option("--requests", min=1, max=100_000)] = 32,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1)] = 1800.0,
    out: OutOption = None,
) -> None:
    """Put a running server on this machine under load, with sglang.bench_serving."""
    from tandemkv.server.preflight import resolve_model

    from .decode import run_child
    from .gpu_query import query_gpu
    from .serving import ServeLoad, bench_serving_argv, serving_rows

    load = ServeLoad(
        url=url,
        tokenizer_dir=resolve_model(tokenizer, lambda _: None),
        name=name,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        concurrency=concurrency,
        num_requests=requests,
    )
    if find_spec("datasets") is None:
        raise SettingsError(
            "sglang.bench_serving needs the package datasets, which is not installed; "
            "`pip install datasets`"
        )
    console = _console()
    with _folder(None) as folder:
        result = folder / "serving.jsonl"
        console.print(f"{requests} requests to {load.url}")
        status, detail = run_child(bench_serving_argv(load, result), folder, timeout_s)
        if not result.exists():
            raise BenchError(f"bench_serving gave no result, {status}: {detail}")
        rows, failures = serving_rows(load, result.read_text(encoding="utf-8"))
    report = make_report("serve", rows, command=_command(), failures=failures, gpu=query_gpu())
    _finish(report, out, console)


@bench_app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Reports of `bench decode`.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="STEM", help="Path without suffix.")
    ] = DEFAULT_FOLDER / "tpot",
) -> None:
    """Draw time per token against context as SVG and PNG; needs the extra `bench`."""
    from .plot import draw
    from .report import read_report

    for path in draw([read_report(file) for file in files], out):
        typer.echo(str(path))


def parse_points(text: str) -> tuple[Point, ...]:
    """Read e.g. ``1x8k,8x65536``.

    Raises
    ------
    SettingsError
        If a point is not of that form, or given twice.
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


def _run_suite(suite: str, only: Sequence[str], out: Path | None) -> None:
    from .report import visible_gpu
    from .suites import run_suite

    console = _console()
    rows, failures = run_suite(suite, only, console.print)
    _finish(
        make_report(suite, rows, command=_command(), failures=failures, gpu=visible_gpu()),
        out,
        console,
    )


def _finish(report: Report, out: Path | None, console: Console) -> None:
    path = out or DEFAULT_FOLDER / f"{report.benchmark}.json"
    write_report(report, path)
    for row in report.rows:
        console.print(_row_text(row), soft_wrap=True, markup=False)
    for failure in report.failures:
        console.print(_failure_text(failure), soft_wrap=True, style="red", markup=False)
    typer.echo(str(path))
    if report.failures or not report.rows:
        raise typer.Exit(1)


def _row_text(row: Row) -> str:
    spread = f" ({row.p10:.4g} to {row.p90:.4g})" if row.p10 is not None and row.p90 else ""
    return f"{row.figure}: {row.value:.4g} {row.unit}{spread}"


def _failure_text(failure: Failure) -> str:
    return f"{failure.figure}: missing, {failure.reason}"


def _console() -> Console:
    return Console(stderr=True, highlight=False)


def _command() -> list[str]:
    return ["tandemkv", *sys.argv[1:]]


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tandemkv-bench-") as name:
        yield Path(name)
