# SPDX-License-Identifier: Apache-2.0
"""Turn checked settings into a launch, and run it."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape

from tandemkv.cache_rank.protocol.errors import SettingsError, TandemKVError
from tandemkv.cache_rank.protocol.fault_points import FAULTS_VARIABLE, enable_faults
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.checks.ports import server_url
from tandemkv.server.checks.preflight import ResolvedLaunch, resolve_cache_rank, resolve_launch
from tandemkv.server.cli.start_view import StartProgress, start_view
from tandemkv.server.models.embedded_model import cache_root
from tandemkv.server.plan.devices import cache_rank_device
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import to_yaml

from .cache_rank_launch import (
    CACHE_RANK_LOGS,
    INFERENCE_RANK_EXIT_S,
    PULSE_TIMEOUT_S,
    SETTINGS_FILE,
    STATUS_TIMEOUT_S,
    SplitLaunch,
    cache_rank_detail,
    cache_rank_launches,
    clean_run_dir,
    log_to_stderr,
    restart_rules,
)
from .child_process import ChildSpec
from .launcher import Launcher, LaunchPlan
from .liveness import Pulse
from .message_launch import message_launches, with_own_link
from .nodes import scheduler_pulse, scheduler_state
from .probes import ServerState, StatusUnavailableError, server_state
from .run_dir_lock import lock_run_dir
from .sglang_command import served_name, sglang_argv, sglang_env

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_SGLANG_LOG = "sglang.log"
_HTTP_TIMEOUT_S = 5.0


def serve(
    settings: ServeSettings,
    console: Console,
    *,
    verbose: bool = False,
    split: SplitLaunch | None = None,
) -> None:
    """Check, start both ranks, serve until a signal, shut down.

    With `split` SGLang alone is started here, once the cache rank answers. Raises `SettingsError`
    or `UnsupportedModelError` before anything is started, `LaunchError` if a rank did not become
    ready, or ended too often.
    """
    progress = StartProgress(console)
    with progress.stage(f"model {settings.model}"):
        launch = resolve_launch(settings, progress.tell)
    with lock_run_dir(settings.run_dir) as lock:
        run_dir = prepare_run_dir(launch, split)
        try:
            if enable_faults("launcher", run_dir.path):
                said = f"[bold red]faults are injected[/]: {FAULTS_VARIABLE} is set; for tests"
                console.print(said)
            plan = make_plan(launch, run_dir, split)
        except BaseException:
            clean_run_dir(run_dir, is_ours=settings.run_dir is None, keep_logs=False)
            raise
        Launcher(replace(plan, lock=lock), console, verbose=verbose).run()


def prepare_run_dir(launch: ResolvedLaunch, split: SplitLaunch | None = None) -> RunDir:
    """Make the run directory; refuse one in which another rank is alive.

    Raises `SettingsError` if it cannot be used.
    """
    run_dir = RunDir.create(launch.settings.run_dir or (split.run_dir if split else None))
    if cache_rank_detail(run_dir) is None:
        raise SettingsError(
            f"run_dir={run_dir.path}: another cache rank is running there; stop it or give "
            "another --run-dir"
        )
    refuse_live_server(run_dir)
    numbers = ("", "[1-9]", "[1-9][0-9]")  # of the cache ranks
    logs = [_SGLANG_LOG, *(f"{name}{number}.log" for name in CACHE_RANK_LOGS for number in numbers)]
    for pattern in (*logs, *(f"{log}.1" for log in logs)):
        for path in run_dir.path.glob(pattern):
            path.unlink(missing_ok=True)
    run_dir.clear_sglang()
    return run_dir


def refuse_live_server(run_dir: RunDir) -> None:
    """Refuse a run directory whose inference rank is alive, also if it is too busy to answer.

    Raises `SettingsError`.
    """
    if server_pid(run_dir.inference_socket) is not None:
        raise SettingsError(
            f"run_dir={run_dir.path}: another server is running there; stop it or give another "
            "--run-dir"
        )


def _prepare_sglang(run_dir: RunDir) -> None:
    """Make the run directory ready for SGLang's first start, or the next one."""
    run_dir.clear_sglang()
    sglang_folders(run_dir)


def sglang_folders(run_dir: RunDir) -> dict[str, str]:
    """Make the folders in which SGLang's processes keep files, and return their variables.

    SGLang's own choice is /tmp, where its sockets and metrics outlive every server. What torch
    compiles is kept for the next start if there is a folder for it that can be written, else torch
    has it in ``TMPDIR``. Metrics stay where the user wants them.
    """
    found = {"TMPDIR": str(run_dir.temporary)}
    run_dir.temporary.mkdir(mode=0o700, exist_ok=True)
    if METRICS_VARIABLE not in os.environ:
        found[METRICS_VARIABLE] = str(run_dir.metrics)
        run_dir.metrics.mkdir(mode=0o700, exist_ok=True)
    if COMPILED_VARIABLE not in os.environ:
        compiled = cache_root() / "inductor"
        with contextlib.suppress(OSError):
            compiled.mkdir(parents=True, exist_ok=True)
        if os.access(compiled, os.W_OK | os.X_OK):  # torch would end SGLang at its start
            found[COMPILED_VARIABLE] = str(compiled)
    return found


def make_plan(
    launch: ResolvedLaunch, run_dir: RunDir, split: SplitLaunch | None = None
) -> LaunchPlan:
    """Return what is to be started here, and write the settings that the cache rank reads."""
    settings = launch.settings.model_copy(update={"port": launch.port})
    device = launch.device
    is_far_here = launch.placement.has_far_host and settings.cache_rank_address is None
    if is_far_here:
        settings = with_own_link(settings, run_dir)
    child_settings = settings.model_copy(
        update={
            "model": str(launch.model_dir),
            "dtype": launch.spec.dtype,
            "device": device,
            "run_dir": run_dir.path,
            "sglang_args": (),  # may hold a key
        }
    )
    fresh = run_dir.path / f"{SETTINGS_FILE}.new"  # nobody reads half of it
    mark = "" if split is None else split.mark
    fresh.write_text(mark + to_yaml(child_settings), encoding="utf-8")
    fresh.replace(run_dir.path / SETTINGS_FILE)
    url = server_url(settings.host, launch.port)
    is_ours = settings.run_dir is None
    ask_state, ask_pulse = _front(settings, run_dir, url)
    argv, env = inference_rank_command(launch, run_dir)
    return LaunchPlan(
        cache_ranks=message_launches(settings, run_dir, is_far_here=is_far_here)
        if launch.placement.has_far_host
        else cache_rank_launches(
            settings, run_dir, stop_signal=signal.SIGINT if split is None else None
        ),
        sglang=ChildSpec(
            name="SGLang",
            argv=argv,
            env=env,
            log_path=run_dir.path / _SGLANG_LOG,
            hang_signal=signal.SIGQUIT,  # as from a child of its that died
        ),
        sglang_waits=launch.placement.has_far_host,
        server_state=ask_state,
        ends_with_sglang=settings.nnodes > 1,
        banner=banner(settings, url, run_dir.path),
        rules=restart_rules(settings, device),
        drain_timeout_s=settings.drain_timeout_s,
        clean_up=lambda keep_logs: clean_run_dir(run_dir, is_ours=is_ours, keep_logs=keep_logs),
        before_sglang=lambda: _prepare_sglang(run_dir),
        holder=lambda: hold_memory(run_dir, launch.placement.engines_of(settings.node_rank)),
        watched=(*run_dir.made, *([glob.escape(str(run_dir.path))] if is_ours else [])),
        start_report=lambda: start_report(run_dir),
        sglang_pulse=ask_pulse,
    )


def _front(
    settings: ServeSettings, run_dir: RunDir, url: str
) -> tuple[Callable[[], ServerState], Callable[[], Pulse]]:
    """Return how this host's SGLang is asked for its state and its pulse.

    The server is at `url`, on the first host; on another there are schedulers alone.
    """
    if settings.node_rank:
        return partial(scheduler_state, run_dir), partial(scheduler_pulse, run_dir)
    state = partial(server_state, url, instance=run_dir.instance)
    return state, partial(sglang_pulse, run_dir, url)


def hold_memory(run_dir: RunDir, engines: Sequence[int]) -> ExitStack:
    """Return what holds the memory of `engines`, by their numbers."""
    with ExitStack() as held:
        for rank in engines:
            own = run_dir.of_rank(rank)
            held.callback(DescriptorHolder(own.holder_socket, own.token).close)
        return held.pop_all()


def inference_rank_command(
    launch: ResolvedLaunch, run_dir: RunDir
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return SGLang's command line and environment; the folders that it names are made."""
    settings, device = launch.settings, launch.device
    argv = sglang_argv(
        settings,
        model_dir=launch.model_dir,
        device=device,
        dtype=launch.spec.dtype,
        port=launch.port,
    )
    env = sglang_env(settings, os.environ, run_dir=run_dir.path, device=device)
    return argv, env | sglang_folders(run_dir)


def start_report(run_dir: RunDir) -> RenderableType | None:
    """Return what the inference rank measured at start; None if it does not say."""
    try:
        reply = request_status(run_dir.inference_socket, STATUS_TIMEOUT_S)
    except TandemKVError:
        return None  # the server answers already; a slow status must not end it
    return start_view(reply.values, reply.info)


def sglang_pulse(run_dir: RunDir, url: str) -> Pulse:
    """Ask SGLang's HTTP process whether it is ready, and its scheduler whether its work moves.

    Raises `StatusUnavailableError` or `CacheRankError` if the HTTP process, or the scheduler's,
    does not answer.
    """
    state = server_state(url, _HTTP_TIMEOUT_S, instance=run_dir.instance)
    if not state.reachable:
        raise StatusUnavailableError(f"{url}: {state.detail}")
    reply = request_status(run_dir.inference_socket, PULSE_TIMEOUT_S)
    return Pulse(is_ready=state.ready, stalled_s=reply.values["stalled_s"])


def banner(settings: ServeSettings, url: str, run_dir: Path) -> str:
    """Return what is shown once the server, or a host that serves no requests, is ready.

    It is rich markup. Where the cache rank works is told as it is decided, when a start begins.
    """
    logs = escape(f"logs in {run_dir}")
    if settings.node_rank:
        return (
            f"\n[bold green]ready[/]: node {settings.node_rank} of {settings.nnodes}; node 0 "
            f"serves requests  ({logs})\n\nCtrl-C stops all nodes."
        )
    body = {
        "model": served_name(settings),
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    selection = settings.selection
    exact = ",".join(map(str, selection.exact_layer_ids)) or "none"
    text, key = escape(shlex.quote(json.dumps(body))), ""
    if settings.edge.api_key_file is not None:
        file = shlex.quote(str(settings.edge.api_key_file))
        key = escape(f'    -H "Authorization: Bearer $(cat {file})" \\\n')
    return (
        f"\n[bold green]ready[/] at [bold]{escape(url)}/v1[/]  (OpenAI API, {logs})\n"
        f"policy [bold]{escape(selection.policy)}[/], K = {selection.budget_tokens} tokens and "
        f"{selection.num_samples} samples per KV head, exact layers {exact}, cache for "
        f"{settings.cache.capacity_tokens} tokens\n\n"
        f"  curl {escape(url)}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"{key}    -d {text}\n"
        f"  tandemkv status --url {escape(url)}\n\n"
        f"Ctrl-C stops {_stopped(settings)}."
    )


def _stopped(settings: ServeSettings) -> str:
    if settings.nnodes > 1:
        return "all nodes"
    return "both ranks" if settings.rank_settings.placement.num_cache_ranks else "the server"


def run_cache_rank_process(settings: ServeSettings, paths: Sequence[Path], rank: int = 0) -> None:
    """Be the cache rank of the run directories `paths`, until a signal; see `cache_rank.process`.

    `rank` is its number, of all cache ranks. Raises `SettingsError` or `UnsupportedModelError` if a
    directory or the model cannot be used, `CacheRankError` if another cache rank serves one.
    """
    from tandemkv.cache_rank.process import run_cache_rank

    log_to_stderr()
    logger = logging.getLogger(__name__)
    run_dirs = [RunDir.create(path).path for path in paths]
    device = cache_rank_device(settings)
    settings, model_dir = resolve_cache_rank(settings, device, logger.info)
    run_cache_rank(
        run_dirs=run_dirs,
        model_dir=model_dir,
        settings=settings.rank_settings,
        max_rows=settings.max_running_requests,
        device=device,
        drain_timeout_s=settings.drain_timeout_s + INFERENCE_RANK_EXIT_S,
        standby=settings.standby,
        rank=rank,
        on_ready=lambda: logger.info("cache rank ready, run directory %s", run_dirs[0]),
    )
