# SPDX-License-Identifier: Apache-2.0
"""The command ``tandemkv quality``."""

from __future__ import annotations

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.request_options import takes

from .request import Request

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


@takes(Request)
def quality(request: Request) -> None:
    """Measure policies against dense on the serving path, and write a report.

    Each configuration is served as `tandemkv serve` would, asked over HTTP, and stopped.
    """
    from .report import write_campaign, write_report

    console = Console(stderr=True, highlight=False)

    def report() -> None:
        for path in write_report(request.folder, console):
            typer.echo(str(path))

    if request.report_only:
        report()
        return
    if request.model is None:
        raise SettingsError("no model given: `tandemkv quality MODEL`, a directory or smollm2")
    from .campaign import describe, prepare
    from .runner import run
    from .servers import MeasurementError

    with console.status("preparing ...") as shown:
        campaign = prepare(request, lambda text: shown.update(f"preparing ... [dim]{text}[/]"))
    write_campaign(request.folder, describe(campaign))
    if request.samples_only:
        for task in campaign.tasks:
            typer.echo(str(request.folder / "samples" / f"{task.name}.jsonl"))
        return
    failure: MeasurementError | None = None
    try:
        run(campaign, console, jobs=request.jobs)
    except MeasurementError as error:
        failure = error
    if failure is None or any(p.stem != "configuration" for p in campaign.runs.glob("*/*.json")):
        report()
    if failure is not None:
        raise failure
