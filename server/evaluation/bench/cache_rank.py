# SPDX-License-Identifier: Apache-2.0
"""A cache rank in a process of its own, beside a benchmark that is the inference rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.step_trace import TRACE_VARIABLE
from tandemkv.server.launch.cache_rank_launch import SETTINGS_FILE, cache_rank_launches
from tandemkv.server.launch.child_process import ChildProcess, watched
from tandemkv.server.launch.launcher import CacheRankLaunch
from tandemkv.server.launch.message_launch import message_launches, with_own_link
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import to_yaml

_START_TIMEOUT_S = 120.0


@contextlib.contextmanager
def cache_rank_beside(
    settings: ServeSettings, run_dir: RunDir, folder: Path, traces: Path | None = None
) -> Iterator[None]:
    """Run the cache ranks of `settings` during the body; nothing if it is in the same process.

    Their output goes to `folder`: ``cache_rank.log``, of several ``cache_rank_0.log`` and so on; by
    messages ``cache_rank.log``, ``cache_rank_1.log``, and of their pumps ``pump.log``,
    ``pump_1.log``. By link `shared` they trace steps into the folder `traces`, if it is given, when
    the benchmark asks for that (`tandemkv.cache_rank.protocol.step_trace`). Raises `SettingsError`
    if one ends, or does not answer in time.
    """
    is_far = settings.rank_settings.placement.has_far_host
    if is_far:
        settings = with_own_link(settings, run_dir)
        launches = message_launches(settings, run_dir, is_far_here=True)
    else:  # decided settings, as `serve` hands them over
        placement = settings.rank_settings.placement
        settings = settings.model_copy(update={"placement": placement})
        launches = cache_rank_launches(settings, run_dir)
    if not launches:
        yield
        return
    if settings.tensor_parallel > 1:
        raise SettingsError(
            f"{settings.rank_settings.placement.num_engines} engines are not measured here; use "
            "cache_ranks 0, or tensor_parallel 1"
        )
    (run_dir.path / SETTINGS_FILE).write_text(to_yaml(settings), encoding="utf-8")
    with contextlib.ExitStack() as running:
        started = []
        for launch in launches:  # by messages a pump as well, and its cache rank first
            assert launch.spec is not None
            name = f"{launch.spec.name.replace(' ', '_')}.log"
            env = {} if traces is None or is_far else {TRACE_VARIABLE: str(traces)}
            spec = replace(launch.spec, log_path=folder / name, env={**launch.spec.env, **env})
            child = running.enter_context(watched(spec))
            started.append((launch, child))
            if is_far:
                _await(launch, child)
        for launch, child in started:
            _await(launch, child)
        yield


def _await(launch: CacheRankLaunch, child: ChildProcess) -> None:
    reason = child.await_ready(launch.detail, _START_TIMEOUT_S)
    if reason is not None:
        raise SettingsError(f"{reason}: {child.log_tail(1)[:300]}")
