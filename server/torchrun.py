# SPDX-License-Identifier: Apache-2.0
"""Both ranks as processes of torchrun: ``torchrun ... -m tandemkv.server.torchrun MODEL``.

The first process is what ``tandemkv serve`` is, but for the cache rank: it makes the run directory,
holds the memory, starts SGLang and keeps it running. Each other one keeps a cache rank running.
Each has its rank as a child, and starts it again when it is lost: torchrun itself, which sees one
of its own processes end, ends all of them.

With addresses of cache ranks (link message) the processes may be on several nodes, and meet there
alone: each has a run directory of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.fault_points import enable_faults
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.cli.command_classes import (
    EPILOG,
    ConfigOption,
    ModelArgument,
    ReportingServeCommand,
    VerboseOption,
    add_arguments,
)
from tandemkv.server.evaluation.request_options import option
from tandemkv.server.launch.cache_rank_launch import (
    SETTINGS_FILE,
    SplitLaunch,
    cache_rank_launches,
    restart_rules,
    want_logs,
)
from tandemkv.server.launch.child_process import end_with_parent
from tandemkv.server.launch.console import LaunchConsole
from tandemkv.server.launch.launcher import Launcher, LaunchPlan
from tandemkv.server.launch.supervision import LaunchError
from tandemkv.server.launch.torchrun_roles import (
    Worker,
    agent_of,
    check_is_here,
    check_processes,
    drain_within,
    forget_torchrun,
    nodes_of,
    open_cache_ranks,
)
from tandemkv.server.settings.flags import SERVE_FLAGS, SWITCH, with_flags
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import Sourced, load_settings

_PAUSE_S = 0.1
_PROGRAM = "torchrun --nproc-per-node N -m tandemkv.server.torchrun"

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(cls=ReportingServeCommand, epilog=EPILOG)
@with_flags(SERVE_FLAGS)
def torchrun(
    ctx: typer.Context,
    flags: dict[str, Sourced],
    model: ModelArgument = None,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
    debug: Annotated[bool, option("Show tracebacks of errors.", "--debug", metavar=SWITCH)] = False,
) -> None:
    """Serve as processes of torchrun: the first is SGLang's, each other one a cache rank's.

    N is 1 + C, with --cache-ranks C; left open, C is N - 1. SGLang starts the processes of --tp
    itself. Options and their sources are those of `tandemkv serve`.

    On several nodes (torchrun --nnodes M), with --tp a multiple of M: SGLang and its cache ranks
    are on every node, and N is 1 + C / M; on GPUs C is 0 by default. Node 0 serves
    requests.

    Or cache ranks alone on other nodes: with all of --tp on the node of rank 0, --link-keys and
    --cache-rank-address tcp://IP:PORT[,...]. The cache rank at the first address is rank 1 of
    torchrun, that at the next one rank 2, and so on.
    """
    del debug  # the command's class reads it
    add_arguments(flags, ctx, model)
    worker = Worker.from_environment(os.environ, agent_of(os.getppid()))
    settings = load_settings(flags, os.environ, config)
    implied = open_cache_ranks(settings, worker)
    if implied is not None:
        source = f"--nproc-per-node {worker.world_size}"
        flags["cache_ranks"] = Sourced(implied, source)
        settings = load_settings(flags, os.environ, config)
    check_processes(settings, worker)
    has_sglang = not worker.place(settings)
    if worker.num_nodes > 1 and has_sglang and not settings.cache_rank_addresses:
        flags |= nodes_of(settings, worker, os.environ)
        settings = load_settings(flags, os.environ, config)
    forget_torchrun(os.environ)
    settings, said = drain_within(settings, os.environ)
    if has_sglang:
        console = LaunchConsole()
        if said:
            console.print(said, soft_wrap=True)
        keep_sglang(settings, worker, console, verbose=verbose)
        return
    silence: contextlib.ExitStack = ctx.obj
    silence.close()  # what goes wrong from here on is this process's own
    keep = keep_addressed_cache_rank if settings.cache_rank_addresses else keep_cache_rank
    keep(settings, worker, verbose=verbose)


def keep_sglang(
    settings: ServeSettings, worker: Worker, console: Console, *, verbose: bool = False
) -> None:
    """Serve as ``tandemkv serve`` does, beside cache ranks that other processes start.

    Raises what `serve` does, and on several nodes `typer.Exit` with 1: torchrun has to end what is
    left there. Cache ranks that are met by messages cannot tell an end from a restart; and an agent
    whose processes ended with 0 waits for the others, of which a signal may have ended one.
    """
    from tandemkv.server.launch.serve import serve

    if not settings.cache_rank_addresses:
        split = worker.launch if worker.local_world_size > 1 else None
        serve(settings, console, verbose=verbose, split=split)
    else:
        alone = settings.model_copy(update={"standby": False})  # that of the cache ranks' hosts
        serve(alone, console, verbose=verbose)
    if settings.nnodes > 1 or settings.cache_rank_addresses:
        raise typer.Exit(1)


def keep_addressed_cache_rank(
    settings: ServeSettings, worker: Worker, *, verbose: bool = False
) -> None:
    """Keep a cache rank running at its address, until a signal.

    The handshake compares `settings`, as given to this process, with the first process's. Raises
    what `run_far_rank` does, and `typer.Exit` with 1 when it ends: the launch may go on, which
    nobody here knows, and torchrun has to end it. While torchrun ends its processes it does not
    look at their codes.
    """
    from tandemkv.server.launch.message_launch import run_far_rank

    number = worker.place(settings) - 1
    address = settings.cache_rank_addresses[number]
    check_is_here(address, worker)
    path, console = worker.cache_rank_dir(settings.run_dir), LaunchConsole()
    run_far_rank(settings, path, address, (), console, rank=number, verbose=verbose)
    raise typer.Exit(1)


def keep_cache_rank(settings: ServeSettings, worker: Worker, *, verbose: bool = False) -> None:
    """Keep the cache rank of `worker` running until a signal, or until the launch is over.

    What the first process made of `settings` is in the run directory. Raises `LaunchError` if the
    cache rank did not become ready or ended too often, `typer.Exit` with 1 if a signal ended this
    process and the launch goes on: torchrun has to end it.
    """
    path = settings.run_dir or worker.launch.run_dir
    found = await_settings(path, worker.launch, settings.start_timeout_s)
    run_dir = RunDir.open(path)
    enable_faults("launcher", run_dir.path)
    plan = cache_rank_plan(found, run_dir, worker.place(settings) - 1)
    Launcher(plan, LaunchConsole(), verbose=verbose).run()
    if not is_over(run_dir):
        raise typer.Exit(1)


def await_settings(path: Path, launch: SplitLaunch, timeout_s: float) -> ServeSettings:
    """Return the settings that the first process of `launch` leaves in `path`.

    Raises `LaunchError` if it does not within `timeout_s`.
    """
    config = path / SETTINGS_FILE
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, SettingsError):
            RunDir.open(path)  # nobody else's
            if config.read_text(encoding="utf-8").startswith(launch.mark):
                return load_settings({}, {}, config)
        time.sleep(_PAUSE_S)
    raise LaunchError(
        f"no settings of the first process in {path} after {timeout_s:g} s (--start-timeout-s); "
        "both must be children of one torchrun: start the module with -m, in no script"
    )


def cache_rank_plan(settings: ServeSettings, run_dir: RunDir, number: int = 0) -> LaunchPlan:
    """Return what a process starts: a cache rank, and its standby if there is one.

    `number` is of those on its host.
    """

    def clean_up(keep_logs: bool) -> None:
        if keep_logs:
            want_logs(run_dir)

    # The signal may come to all processes at once: requests under way need the cache rank.
    launches = cache_rank_launches(settings, run_dir, stop_signal=signal.SIGTERM)
    return LaunchPlan(
        cache_ranks=launches[number : number + 1],
        sglang=None,
        is_over=lambda: is_over(run_dir),
        rules=restart_rules(settings, settings.device_or("cpu")),
        drain_timeout_s=settings.drain_timeout_s,
        clean_up=clean_up,
    )


def is_over(run_dir: RunDir) -> bool:
    """Whether the first process has ended the launch: it removes what it made."""
    return not (run_dir.path / SETTINGS_FILE).exists()


def main() -> None:
    """Run the command.

    The first process of a node speaks for all there, until another has something of its own.
    """
    end_with_parent(signal.SIGTERM)
    first = "RANK" if os.environ.get("GROUP_RANK", "0") == "0" else "LOCAL_RANK"
    with contextlib.ExitStack() as silence:
        if os.environ.get(first, "0") != "0":
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
        app(prog_name=_PROGRAM, obj=silence)


if __name__ == "__main__":
    main()
