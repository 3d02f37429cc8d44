# SPDX-License-Identifier: Apache-2.0
"""How a launch starts a cache rank, and how it asks one of a run directory."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import CacheRankError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.settings.launch_settings import ServeSettings

from .child_process import ChildSpec
from .launcher import CacheRankLaunch
from .liveness import Pulse
from .sglang_command import cache_rank_argv, cache_rank_env
from .supervision import RestartRules

SETTINGS_FILE = "cache_rank.yaml"
CACHE_RANK_LOGS = ("cache_rank", "standby", "pump")
"""Names of logs, which a number follows, of all cache ranks but the first."""
STATUS_TIMEOUT_S, PULSE_TIMEOUT_S = 0.5, 2.0
INFERENCE_RANK_EXIT_S = 10.0
"""Beyond --drain-timeout-s, for an inference rank to end its processes."""
_HANG_S = {"cpu": 15.0, "cuda": 60.0}
"""Default of --hang-timeout-s. On a GPU the host sees a pass as one piece, compiling included."""
_KEEP_LOGS_FILE = "keep-logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLaunch:
    """A launch of several processes of one host: one has SGLang, each other one a cache rank."""

    run_dir: Path
    """Where all look, unless the settings name a run directory."""
    launch_id: str
    """By which a cache rank's process knows settings of this launch from those of an earlier."""

    @property
    def mark(self) -> str:
        """First line of the settings that SGLang's process leaves for the others."""
        return f"# launch {self.launch_id}\n"


def want_logs(run_dir: RunDir) -> None:
    """Have the process that removes `run_dir` leave the logs; nothing if it is gone already."""
    with contextlib.suppress(OSError):
        (run_dir.path / _KEEP_LOGS_FILE).touch(mode=0o600)


def clean_run_dir(run_dir: RunDir, *, is_ours: bool, keep_logs: bool) -> None:
    """Remove the run directory; of one that the user gave, what we put there.

    The logs stay if `keep_logs` or a process of a split launch wants it (`want_logs`), and in a
    directory that the user gave.
    """
    if is_ours and not (keep_logs or (run_dir.path / _KEEP_LOGS_FILE).exists()):
        run_dir.remove()
    else:
        run_dir.clear()


def cache_rank_launches(
    settings: ServeSettings,
    run_dir: RunDir,
    *,
    stop_signal: signal.Signals | None = signal.SIGINT,
) -> tuple[CacheRankLaunch, ...]:
    """Return all cache ranks of this host; none if local.

    With ``--standby`` each has one that takes its place. Their directories are made. `settings`
    have a placement; the processes read theirs from the run directory (`SETTINGS_FILE`), where the
    logs are. SIGINT ends a cache rank at once, for a launcher that has ended SGLang before; at
    SIGTERM it waits for its inference rank to go. Without `stop_signal` another process starts
    them.
    """
    placement = settings.rank_settings.placement
    here, count = placement.engines_of(settings.node_rank), placement.engines_per_rank
    engines = {number: run_dir.of_rank(number, create=True) for number in here}
    return tuple(
        cache_rank_launch(
            settings,
            run_dir,
            [engines[number] for number in range(rank * count, (rank + 1) * count)],
            rank,
            stop_signal,
        )
        for rank in placement.cache_ranks_of(settings.node_rank)
    )


def cache_rank_launch(
    settings: ServeSettings,
    run_dir: RunDir,
    own: Sequence[RunDir],
    rank: int,
    stop_signal: signal.Signals | None,
) -> CacheRankLaunch:
    """Return cache rank `rank`, whose engines' sockets are in `own`; see `cache_rank_launches`."""
    placement = settings.rank_settings.placement
    number = "" if placement.num_cache_ranks == 1 else f" {rank}"
    config = run_dir.path / SETTINGS_FILE
    argv = cache_rank_argv(run_dirs=[each.path for each in own], config=config, rank=rank)
    env = cache_rank_env(os.environ, device=placement.model_device)

    def spec(name: str, log: str) -> ChildSpec | None:
        if stop_signal is None:
            return None
        path = run_dir.path / f"{log}{rank or ''}.log"
        return ChildSpec(
            name=name + number, argv=argv, env=env, log_path=path, stop_signal=stop_signal
        )

    log, standby_log, _ = CACHE_RANK_LOGS
    return CacheRankLaunch(
        spec=spec("cache rank", log),
        standby=spec("standby cache rank", standby_log) if settings.standby else None,
        detail=partial(cache_rank_detail, *own),
        pulse=partial(cache_rank_pulse, own),
    )


def restart_rules(settings: ServeSettings, device: str) -> RestartRules:
    """Return when a rank is ended and started again; `device` is the inference rank's."""
    return RestartRules(
        hang_timeout_s=settings.hang_timeout_s or _HANG_S[device],
        start_timeout_s=settings.start_timeout_s,
        max_restarts=settings.max_restarts,
    )


def cache_rank_detail(*run_dirs: RunDir) -> str | None:
    """Return None if the cache rank of `run_dirs` answers in all of them, else why it does not."""
    try:
        for each in run_dirs:
            request_status(each.heartbeat_socket, STATUS_TIMEOUT_S)
    except CacheRankError as error:
        return str(error)
    return None


def cache_rank_pulse(run_dirs: Sequence[RunDir], pid: int) -> Pulse:
    """Ask the cache rank of `run_dirs` whether its work moves; `pid` may be waiting to be it.

    Raises `CacheRankError` if it is `pid`, and does not answer.
    """
    if server_pid(run_dirs[0].heartbeat_socket) not in (None, pid):
        return Pulse(is_ready=True, stalled_s=0.0, waits=True)  # nothing is asked of it
    replies = [request_status(each.heartbeat_socket, PULSE_TIMEOUT_S) for each in run_dirs]
    return Pulse(is_ready=True, stalled_s=max(reply.values["stalled_s"] for reply in replies))


def log_to_stderr() -> None:
    """Have this process log as a rank does, whose launcher keeps what it prints."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
