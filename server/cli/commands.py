# SPDX-License-Identifier: Apache-2.0
"""The commands of ``tandemkv``. Exit codes: 2 for bad input, 1 for a failure."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, SettingsError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder, ask_holder
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.evaluation.bench.command import bench_app
from tandemkv.server.evaluation.calibrate.command import calibrate
from tandemkv.server.evaluation.inspect.command import inspect as inspect_command
from tandemkv.server.evaluation.quality import command as quality_command
from tandemkv.server.evaluation.request_options import option
from tandemkv.server.launch.console import LaunchConsole
from tandemkv.server.plan.command import plan
from tandemkv.server.settings.flags import (
    DRAIN_FLAGS,
    INFERENCE_FLAGS,
    RANK_FLAGS,
    ROW_FLAGS,
    SERVE_FLAGS,
    STANDBY_FLAGS,
    SWITCH,
    with_flags,
)
from tandemkv.server.settings.launch_settings import EMBEDDED_MODEL
from tandemkv.server.settings.sources import Sourced, load_settings, to_yaml
from tandemkv.server.soak import command as soak_command

from .command_classes import (
    EPILOG,
    ConfigOption,
    ModelArgument,
    ReportingGroup,
    ServeCommand,
    VerboseOption,
    add_arguments,
)
from .policies_command import policies

_STOP = (signal.SIGTERM, signal.SIGINT)
_ANSWER_S = 2.0

RankModel = Annotated[str | None, option(f"Model directory, or {EMBEDDED_MODEL}.", "--model")]


_CALIBRATED_ALONE = (
    "With --cache-ranks 0: take up what `tandemkv calibrate MODEL` has left on this machine for "
    "this model (default). Beside a cache rank, which does not, it is off."
)


class Role(StrEnum):
    """A process that nothing but its run directory leads to."""

    MEMORY = "memory"
    CACHE_RANK = "cache-rank"


app = typer.Typer(
    cls=ReportingGroup, no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
    help="Serve long contexts with SGLang and a cache rank that holds the KV.",
)  # fmt: skip

app.command("inspect")(inspect_command)
app.command()(plan)
app.command()(policies)
app.command()(calibrate)
app.add_typer(bench_app, name="bench")


@app.callback()
def _root(
    debug: Annotated[bool, option("Show tracebacks of errors.", "--debug")] = False,
) -> None:
    """Take the options that come before the command."""


@app.command(cls=ServeCommand, epilog=EPILOG)
@with_flags(SERVE_FLAGS)
def serve(
    ctx: typer.Context,
    flags: dict[str, Sourced],
    model: ModelArgument = None,
    config: ConfigOption = None,
    print_settings: Annotated[
        bool, option("Print all settings as YAML and exit.", "--print-settings", metavar=SWITCH)
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Start a cache rank and SGLang, and serve until Ctrl-C.

    Settings: flags, then TANDEMKV_SERVE_* variables, then --config, then defaults.
    """
    add_arguments(flags, ctx, model)
    otherwise = {"model": Sourced(EMBEDDED_MODEL, "--print-settings")} if print_settings else {}
    settings = load_settings(flags, os.environ, config, otherwise=otherwise)
    if print_settings:
        typer.echo(to_yaml(settings), nl=False)
        return
    from tandemkv.server.launch.serve import serve as run_serve

    run_serve(settings, LaunchConsole(), verbose=verbose)


def _address(text: str) -> str:
    """Return an address of --allow as connections have it."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise SettingsError(
            f"--allow {text}: no IP address; give those of the inference ranks, not names"
        ) from None


@app.command("cache-rank")
@with_flags((*RANK_FLAGS, *ROW_FLAGS, *DRAIN_FLAGS, *STANDBY_FLAGS))
def cache_rank(
    flags: dict[str, Sourced],
    run_dirs: Annotated[
        list[Path],
        option(
            "Directory shared with the inference rank; with --tp one for each that it serves.",
            "--run-dir",
            metavar="PATH",
        ),
    ],
    model: RankModel = None,
    config: ConfigOption = None,
    rank: Annotated[int, option("Its number, of all cache ranks of the server.", min=0)] = 0,
    address: Annotated[
        str | None, option("tcp://HOST:PORT for inference ranks of other hosts.")
    ] = None,
    allow: Annotated[
        str, option("With --address: where they may come from; default: anywhere.")
    ] = "",
    verbose: Annotated[
        bool,
        option("With --address: show the cache rank's log.", "--verbose", "-v", metavar=SWITCH),
    ] = False,
) -> None:
    """Run one cache rank; `serve` starts it by itself.

    Its settings must equal those of the inference rank.
    """
    if model is not None:
        flags["model"] = Sourced(model, "--model")
    flags["run_dir"] = Sourced(run_dirs[0], "--run-dir")
    settings = load_settings(flags, os.environ, config)
    if address is not None:
        from tandemkv.server.launch.message_launch import run_far_rank

        hosts = [_address(host.strip()) for host in allow.split(",") if host.strip()]
        console = LaunchConsole()
        run_far_rank(settings, run_dirs[0], address, hosts, console, rank, verbose=verbose)
        return
    if settings.cache_rank_address is not None:
        raise SettingsError(
            f"cache_rank_address={settings.cache_rank_address}: a cache rank of another host needs "
            "to know where to listen; add --address tcp://IP:PORT, its own"
        )
    if allow or settings.link_keys is not None:
        raise SettingsError(
            "--allow and --link-keys are for inference ranks of other hosts, and without an "
            "address none of them can connect; add --address tcp://IP:PORT, or leave them out"
        )
    from tandemkv.server.launch.serve import run_cache_rank_process

    run_cache_rank_process(settings, run_dirs, rank)


@app.command(hidden=True)
def pump(
    run_dir: Annotated[Path, option("Of the inference rank.")],
    config: ConfigOption = None,
    rank: Annotated[int, option("Number of the cache rank.", min=0)] = 0,
) -> None:
    """Carry steps and K/V to a cache rank on another host; `serve` starts it by itself."""
    from tandemkv.server.launch.message_launch import run_pump

    run_pump(load_settings({}, {}, config), run_dir, rank)


@app.command("link-keys")
def link_keys(
    folder: Annotated[Path, typer.Argument(help="Where the keys of both ends are made.")],
) -> None:
    """Make CURVE keys for an inference rank and a cache rank on two hosts.

    Each host needs its own .key_secret file, and both .key files. Keys that are there are kept; a
    .key file that was moved away is made again from its .key_secret file.
    """
    from tandemkv.cache_rank.protocol.message.keys import key_files, make_keys

    made = make_keys(folder)
    for path in made:
        typer.echo(str(path))
    for path in key_files(folder):
        if path not in made:
            typer.echo(f"kept: {path}", err=True)


@app.command()
def memory(run_dir: Annotated[Path, option("Directory shared with both ranks.")]) -> None:
    """Hold the memory of two ranks that something else started; `serve` does it by itself.

    It needs no GPU. Memory that it holds is used again by an inference rank that is restarted.
    """
    held = RunDir.create(run_dir)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # also in the holder's thread
    try:
        with closing(DescriptorHolder(held.holder_socket, held.token)):
            typer.echo(f"holding memory for the ranks of {held.path}", err=True)
            signal.sigwait(_STOP)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@app.command("inference-rank", cls=ServeCommand, epilog=EPILOG)
@with_flags(INFERENCE_FLAGS, {"calibrated": _CALIBRATED_ALONE})
def inference_rank(
    ctx: typer.Context,
    flags: dict[str, Sourced],
    run_dir: Annotated[Path, option("Directory shared with the cache rank.")],
    model: RankModel = None,
    config: ConfigOption = None,
) -> None:
    """Run SGLang beside a cache rank that something else started; `serve` does both by itself.

    Its settings must equal those of the cache rank, for which it waits.
    """
    add_arguments(flags, ctx, model, "--model")
    settings = load_settings(flags, os.environ, config)
    from tandemkv.server.launch.inference_process import become_inference_rank

    become_inference_rank(settings, run_dir, lambda text: typer.echo(text, err=True))


@app.command()
def status(
    url: Annotated[str, option("Address of the server.")] = "http://127.0.0.1:30000",
    as_json: Annotated[bool, option("Print the reply as JSON.", "--json")] = False,
) -> None:
    """Show counters and gauges of a running server. Exit code 1 while it is not ready."""
    from tandemkv.server.launch.probes import fetch_status

    reply = fetch_status(url)
    if as_json:
        typer.echo(json.dumps(reply, indent=2, sort_keys=True))
    else:
        from .status_view import status_table

        Console(highlight=False).print(status_table(reply, url))
    if not reply.get("ready"):
        raise typer.Exit(1)


@app.command()
def alive(
    role: Annotated[Role, typer.Argument(help="What to ask.")],
    run_dir: Annotated[Path, option("Run directory of the ranks.")],
    hang_timeout_s: Annotated[
        float, option("Longest time without progress.", min=1, metavar="NUMBER")
    ] = 60.0,
) -> None:
    """Ask a rank of a run directory, for probes. Exit code 1 if it does not answer, or hangs."""
    asked = RunDir.open(run_dir)
    if role is Role.MEMORY:
        ask_holder(asked.holder_socket, token=asked.token, timeout_s=_ANSWER_S)
        return
    stalled_s = request_status(asked.heartbeat_socket, _ANSWER_S).values["stalled_s"]
    if stalled_s > hang_timeout_s:
        raise CacheRankLostError(
            f"its work has not moved for {stalled_s:.0f} s, allowed are {hang_timeout_s:g} s "
            "(--hang-timeout-s)"
        )


@app.command("model-path")
def model_path(
    name: Annotated[str, typer.Argument(help=f"Name of an embedded model: {EMBEDDED_MODEL}.")],
) -> None:
    """Print the directory of an embedded model, unpacking it on first use."""
    if name != EMBEDDED_MODEL:
        raise SettingsError(f"name={name}: no such embedded model; there is {EMBEDDED_MODEL}")
    from tandemkv.server.models.embedded_model import embedded_model_dir

    console = LaunchConsole()
    with console.status(f"unpacking {name} ...") as shown:
        path = embedded_model_dir(shown.update)
    typer.echo(str(path))


@app.command()
def doctor(
    port: Annotated[int, option("Port that is to be free.", min=1, max=65535)] = 30000,
    run_dir: Annotated[Path | None, option("Run directory to check.")] = None,
    as_json: Annotated[bool, option("Print the findings as JSON.", "--json")] = False,
) -> None:
    """Check this machine; each line says what to do. Exit code 1 if anything fails."""
    from .doctor import findings_table, run_checks

    findings = run_checks(port=port, run_dir=run_dir)
    if as_json:
        typer.echo(json.dumps([item._asdict() for item in findings], indent=2))
    else:
        Console(highlight=False).print(findings_table(findings))
    if any(item.level == "fail" for item in findings):
        raise typer.Exit(1)


app.command(epilog=quality_command.EPILOG)(quality_command.quality)
app.command(cls=soak_command.SoakCommand, epilog=soak_command.EPILOG)(soak_command.soak)
