# SPDX-License-Identifier: Apache-2.0
"""Be the inference rank of a run directory: the counterpart of ``tandemkv cache-rank``.

For places that start and restart the two ranks themselves, such as two containers of one pod.
``tandemkv serve`` does not need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import CacheRankError, SettingsError
from tandemkv.cache_rank.protocol.memory.descriptor_holder import ask_holder
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.checks.preflight import resolve_launch
from tandemkv.server.plan.devices import as_pair, check_one_cache_rank
from tandemkv.server.settings.launch_settings import ServeSettings

from .cache_rank_launch import cache_rank_detail
from .serve import inference_rank_command, refuse_live_server
from .supervision import LaunchError

_PAUSE_S = 0.5


def become_inference_rank(
    settings: ServeSettings, path: Path, progress: Callable[[str], None]
) -> None:
    """Check, wait for the cache rank of `path`, and replace this process by SGLang's server.

    `settings` equal those of the cache rank; the handshake compares them. The run directory `path`
    is made if it is not there yet.

    Raises `SettingsError` or `UnsupportedModelError` if the settings do not fit this machine, the
    model or this version, or have several tensor-parallel ranks with a cache rank each;
    `LaunchError` if no cache rank answers within ``start_timeout_s``.
    """
    link = settings.wished_link or "shared"
    if link == "shared":
        check_one_cache_rank(settings)
    if link == "message":
        raise SettingsError(
            "transport=message takes a pump beside the inference rank, which `tandemkv serve "
            "--cache-rank-address` starts; use it instead of inference-rank"
        )
    settings = as_pair(settings)
    if settings.cache_ranks:  # it fills in no files, and the handshake compares them
        settings = settings.model_copy(update={"calibrated": False})
    launch = resolve_launch(settings, progress)
    run_dir = RunDir.create(path)
    refuse_live_server(run_dir)
    if launch.settings.cache_ranks:
        wait_for_cache_rank(run_dir, settings.start_timeout_s, progress)
    if launch.placement.maps_memory:
        tell_unheld(run_dir, progress)
    run_dir.clear_sglang()
    argv, env = inference_rank_command(launch, run_dir)
    os.execve(argv[0], argv, env)


def tell_unheld(run_dir: RunDir, progress: Callable[[str], None]) -> None:
    """Say so if nothing holds memory in `run_dir`: serving does not need it, restarting does."""
    try:
        ask_holder(run_dir.holder_socket, token=run_dir.token)
    except CacheRankError as error:
        progress(
            f"memory is not held beyond this rank's life: {error}; `tandemkv memory --run-dir "
            f"{run_dir.path}` holds it, and must be started first"
        )


def wait_for_cache_rank(run_dir: RunDir, timeout_s: float, progress: Callable[[str], None]) -> None:
    """Return once the cache rank of `run_dir` answers.

    Raises `LaunchError` if it does not within `timeout_s`, with its last answer.
    """
    deadline = time.monotonic() + timeout_s
    told = ""
    while (reason := cache_rank_detail(run_dir)) is not None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"no cache rank after {timeout_s:g} s (--start-timeout-s): {reason}; start "
                f"`tandemkv cache-rank --run-dir {run_dir.path}` with the same settings"
            )
        if reason != told:
            progress(f"waiting for the cache rank: {reason}")
            told = reason
        time.sleep(_PAUSE_S)
