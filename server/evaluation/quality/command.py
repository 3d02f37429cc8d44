# SPDX-License-Identifier: Apache-2.0
"""The command ``tandemkv quality``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.request_options import takes

from .request import Request

EPILOG = (
    "Tasks: perplexity, continuation, mass, niah_single, niah_multi_key, niah_multi_value, "
    "niah_eight_keys, records, variable_tracking, variable_value, multi_document_qa, "
    "multi_document_numbers, long_generation, long_generation_short, and file:PATH of a "
    "LongBench, RULER or AIME JSONL file. With +late (niah_single+late) the question is decoded "
    "after the context instead of prefilled with it, with +turn it comes in a second request, "
    "with @8k the prompts have that length. docs/quality.md says how each is defined and how to "
    "read the report."
)


@takes(Request)
def quality(request: Request) -> None:
    """Measure policies against dense on the serving path, and write a report.

    Each configuration is served as `tandemkv serve` would, asked over HTTP, and stopped.
    """
    console = Console(stderr=True, highlight=False)
    if request.compare is not None:
        from .compare import compare, comparison_view

        one, other = request.compare
        Console(highlight=False).print(comparison_view(compare(one, other), one, other))
        return
    if request.pareto is not None:
        _draw_pareto(request, console)
        return
    from .report import write_campaign, write_report

    if request.report_only:
        _list(write_report(request.folder, console))
        return
    if request.model is None:
        raise SettingsError("no model given: `tandemkv quality MODEL`, a directory or smollm2")
    from .campaign import describe, prepare
    from .runner import run
    from .served import dense_note
    from .servers import MeasurementError

    with console.status("preparing ...") as shown:
        campaign = prepare(
            request, lambda text: shown.update(f"preparing ... [dim]{escape(text)}[/]")
        )
    write_campaign(request.folder, describe(campaign))
    longest = campaign.prompts.longest
    told = dense_note(campaign.choice, longest, request.concurrency) if request.as_served else None
    if told is not None:
        console.print(f"note: {told}", markup=False, soft_wrap=True)
    if request.samples_only:
        _list(request.folder / "samples" / f"{task.name}.jsonl" for task in campaign.tasks)
        return
    try:
        run(campaign, console, jobs=request.jobs)
    except MeasurementError:
        if any(path.stem != "configuration" for path in campaign.runs.glob("*/*.json")):
            _list(write_report(request.folder, console))
        raise
    _list(write_report(request.folder, console))


def _list(paths: Iterable[Path]) -> None:
    for path in paths:
        typer.echo(str(path))


def _draw_pareto(request: Request, console: Console) -> None:
    from .pareto import draw_pareto, pareto, pareto_view

    quality_file, decode_file = request.pareto or (request.out, request.out)
    tasks = None if request.tasks is None else request.task_names
    found = pareto(quality_file, decode_file, tasks)
    missing = sorted({name for item in found for name in item.missing})
    if missing:
        text = (
            f"not drawn, for {decode_file} has no time of them, or no queued one where others "
            f"have: {', '.join(missing)}"
        )
        console.print(text, markup=False, soft_wrap=True)
    console.print(pareto_view(found))
    _list(draw_pareto(found, request.folder / "pareto"))
