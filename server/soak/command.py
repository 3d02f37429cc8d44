# SPDX-License-Identifier: Apache-2.0
"""``tandemkv soak``."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.cli.command_classes import ServeCommand, passed_through
from tandemkv.server.evaluation.compact_json import compact_json
from tandemkv.server.evaluation.request_options import option, takes
from tandemkv.server.evaluation.result_file import check_result_file

if TYPE_CHECKING:
    from .faults import Action
    from .target import Target

EPILOG = (
    "What follows -- goes to `tandemkv serve` unchanged, and what follows a second -- to SGLang. "
    "The soak itself sets --host, --port, --run-dir, --api-key-file, --admin-key-file and "
    "--max-restarts."
)
_STARTED, _RUNNING = "kill,stop,pause,delay,drop", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """Options of ``tandemkv soak``."""

    ctx: typer.Context
    model: Annotated[
        str | None,
        typer.Argument(help="Model to start a server with; what follows -- goes to `serve`."),
    ] = None
    url: Annotated[
        str | None, option("Address of a running server, to use instead of a new one.")
    ] = None
    duration_s: Annotated[
        float, option("Seconds of load.", "--duration", min=10, max=7 * 86400)
    ] = 180.0
    seed: Annotated[int, option("Decides which requests are sent and which faults are caused.")] = 1
    concurrency: Annotated[int, option("Requests at once.", min=1, max=1024)] = 4
    faults: Annotated[
        str | None,
        option(
            "kill, stop and pause ranks; delay and drop at fault points; or none. A list "
            f"with commas; default {_STARTED} for a server that is started, {_RUNNING} for --url."
        ),
    ] = None
    calm_s: Annotated[
        float, option("Mean seconds between two kills or stops.", "--calm", min=1)
    ] = 45.0
    longest_tokens: Annotated[
        int, option("Tokens of the longest prompt, about.", "--longest-prompt", min=64)
    ] = 600
    ready_within_s: Annotated[
        float,
        option(
            "Seconds that a server may take from a crash until it is ready.",
            "--ready-within",
            min=1,
        ),
    ] = 60.0
    refused_within_s: Annotated[
        float,
        option(
            "Seconds within which 95 % of bad requests must be refused.",
            "--refused-within",
            min=0.01,
        ),
    ] = 1.0
    expect_no_loss: Annotated[
        bool, option("Fail if the loss of a cache rank ends a single request.", "--expect-no-loss")
    ] = False
    api_key_file: Annotated[Path | None, option("Key of the server at --url.")] = None
    admin_key_file: Annotated[Path | None, option("Its admin key, to empty the prefix cache.")] = (
        None
    )
    out: Annotated[Path | None, option("Write the report there.", "--json", metavar="FILE")] = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """Faults that are caused; raises as `parse_actions`."""
        from .faults import parse_actions

        usual = _STARTED if self.url is None else _RUNNING
        return parse_actions(usual if self.faults is None else self.faults)


@takes(SoakRequest)
def soak(request: SoakRequest) -> None:
    """Load a server, kill and stop its ranks, and judge answers and leftovers.

    Requests are mixed; some are bad, or given up in mid-stream.

    Judged: lost and wrong answers, time until ready, leaks, growing latency.

    Exit code 1 if anything fails.
    """
    from .faults import points_text
    from .target import running_target, started_target

    model, url = request.model, request.url
    if (model is None) == (url is None):
        raise SettingsError("give either a MODEL to start a server with, or --url of one that runs")
    actions = request.actions
    if request.out is not None:
        check_result_file(request.out, "--json")
    console = Console(stderr=True, highlight=False, markup=False)
    target: contextlib.AbstractContextManager[Target]
    if url is not None:
        points = [name for name in actions if name in ("delay", "drop")]
        if points:
            raise SettingsError(
                f"--faults {','.join(points)}: fault points are switched on when a server is "
                "started; leave --url out, or use kill, stop and pause"
            )
        if passed_through(request.ctx):
            raise SettingsError(
                "what follows -- is for a server that is started; leave it out, or give a MODEL in "
                "place of --url"
            )
        keys = {"api_key_file": request.api_key_file, "admin_key_file": request.admin_key_file}
        target = contextlib.nullcontext(running_target(url, **keys))
    else:
        assert model is not None
        if request.api_key_file is not None or request.admin_key_file is not None:
            raise SettingsError(
                "--api-key-file and --admin-key-file are keys of the server at --url; leave them "
                "out: the server that is started for the soak has keys of its own"
            )
        console.print(f"starting a server: tandemkv serve {model}")
        faults = points_text(request.seed, actions)
        target = started_target(model, passed_through(request.ctx), faults=faults)
    # As Ctrl-C: the server that was started is ended, and its files go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not _run(target, request, console):
        raise typer.Exit(1)


def _run(
    target: contextlib.AbstractContextManager[Target], request: SoakRequest, console: Console
) -> bool:
    from .judge import judge
    from .report import as_json, as_tables
    from .run import soak as run_soak

    with target as server:
        if server.processes is None:
            console.print("the server is on another host: no faults, and no processes to look at")
        found = run_soak(server, request, console.print)
    verdict = judge(found, server)
    where = "started for the soak" if server.is_ours else server.url
    report = as_json(found, verdict, where)
    if request.out is not None:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        request.out.write_text(compact_json(report), encoding="utf-8")
    Console(highlight=False).print(as_tables(report))
    return verdict.passed


class SoakCommand(ServeCommand):
    """The command's class: what follows ``--`` goes to `serve`."""

    passed_to = "SERVE"
