# SPDX-License-Identifier: Apache-2.0
"""The command ``tandemkv quality``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError

_DEFAULT_POLICIES = "look_ahead,streaming"
_DEFAULT_BUDGETS = "12.5%"
_DEFAULT_TASKS = "perplexity,niah_single"
_EPILOG = (
    "Tasks: perplexity, continuation, mass, niah_single, niah_multi_key, niah_multi_value, "
    "variable_tracking, multi_document_qa, and file:PATH of a LongBench, RULER or AIME JSONL "
    "file. With +late (niah_single+late) the question is decoded after the context instead of "
    "prefilled with it, with +turn it comes in a second request. docs/quality.md says how each is "
    "defined and how to read the report."
)


def add_to(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog=_EPILOG)(quality)


def quality(
    model: Annotated[
        str | None, typer.Argument(help="Model directory, or smollm2 (embedded).")
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Policies, separated by commas; dense is added. Settings of one alone follow it: "
            "look_ahead+fetch_cap=64+distance=2.",
        ),
    ] = _DEFAULT_POLICIES,
    budgets: Annotated[
        str,
        typer.Option(
            "--budgets",
            help="Tokens attended to per KV head, separated by commas: 512, or 12.5% of the "
            "context. Every policy gets the same.",
        ),
    ] = _DEFAULT_BUDGETS,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks, separated by commas; see below.")
    ] = _DEFAULT_TASKS,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Samples a task; texts for perplexity.")
    ] = 8,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of results; the same command resumes there.")
    ] = Path("quality"),
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", min=256, help="Length of the prompts.")
    ] = 4096,
    forced_tokens: Annotated[
        int, typer.Option("--forced-tokens", min=17, help="Tokens forced or continued a text.")
    ] = 128,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Instead of each task's own.")
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            help="Text file, folder, or JSON of texts; may be repeated. Default: texts that come "
            "with Python and installed packages.",
        ),
    ] = None,
    prompt_style: Annotated[
        Literal["raw", "chat"],
        typer.Option("--prompt-style", help="Plain completion, or the model's chat template."),
    ] = "raw",
    seed: Annotated[int, typer.Option("--seed", help="Of the samples.")] = 0,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Servers at once; two to three cores each on cpu.")
    ] = 1,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=256, help="Requests at once, a server.")
    ] = 4,
    no_dense: Annotated[
        bool, typer.Option("--no-dense", help="Leave stock SGLang out; nothing to compare with.")
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="As for serve.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="As for serve."),
    ] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of serve, e.g. selection.exact_layers=0."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML settings of serve.")
    ] = None,
    dense_args: Annotated[
        str,
        typer.Option(
            "--dense-args",
            help="More arguments of stock SGLang, e.g. '--attention-backend flashinfer'.",
        ),
    ] = "",
    samples_from: Annotated[
        Path | None,
        typer.Option(
            "--samples-from",
            metavar="DIR",
            help="Ask the prompts of another --out; lengths, seed and corpus are those.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="I/N",
            help="Ask every N-th sample from the I-th on; tests/bench/quality_merge.py joins.",
        ),
    ] = None,
    samples_only: Annotated[
        bool, typer.Option("--samples-only", help="Write samples/ and stop: nothing is started.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Make the report anew from what is in --out.")
    ] = False,
) -> None:
    """Measure policies against dense on the serving path, and write a report.

    Each configuration is served as `tandemkv serve` would, asked over HTTP, and stopped.
    """
    from .report import write_campaign, write_report

    console = Console(stderr=True, highlight=False)
    if report_only:
        for path in write_report(out.expanduser(), console):
            typer.echo(str(path))
        return
    if model is None:
        raise SettingsError("no model given: `tandemkv quality MODEL`, a directory or smollm2")
    from .campaign import Request, describe, prepare
    from .runner import run
    from .servers import MeasurementError

    request = Request(
        model=model,
        policies=_split(policies),
        budgets=_split(budgets),
        tasks=_split(tasks),
        out=out.expanduser(),
        num_samples=samples,
        context_tokens=context_tokens,
        num_forced_tokens=forced_tokens,
        max_new_tokens=max_new_tokens,
        corpus=[path.expanduser() for path in corpus or ()],
        prompt_style=prompt_style,
        seed=seed,
        concurrency=concurrency,
        with_dense=not no_dense,
        device=device,
        dtype=dtype,
        settings=settings or (),
        config=config,
        samples_from=samples_from and samples_from.expanduser(),
        part=part,
        dense_args=dense_args,
    )
    with console.status("preparing ...") as shown:
        campaign = prepare(request, lambda text: shown.update(f"preparing ... [dim]{text}[/]"))
    write_campaign(request.out, describe(campaign))
    if samples_only:
        for task in campaign.tasks:
            typer.echo(str(request.out / "samples" / f"{task.name}.jsonl"))
        return
    failure: MeasurementError | None = None
    try:
        run(campaign, console, jobs=jobs)
    except MeasurementError as error:
        failure = error
    has_results = any(p.stem != "configuration" for p in campaign.runs.glob("*/*.json"))
    if failure is None or has_results:
        for path in write_report(request.out, console):
            typer.echo(str(path))
    if failure is not None:
        raise failure


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
