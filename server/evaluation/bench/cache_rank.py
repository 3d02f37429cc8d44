# SPDX-License-Identifier: Apache-2.0
"""A cache rank in a process of its own, beside a benchmark that is the inference rank."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.cache_rank_launch import SETTINGS_FILE, cache_rank_detail
from tandemkv.server.guard import Guard
from tandemkv.server.settings import ServeSettings
from tandemkv.server.settings_sources import to_yaml
from tandemkv.server.sglang_command import cache_rank_argv, cache_rank_env

_START_TIMEOUT_S = 120.0


@contextlib.contextmanager
def cache_rank_beside(settings: ServeSettings, run_dir: RunDir, folder: Path) -> Iterator[None]:
    """Run the cache rank of `settings` during the body; nothing if it is in the same process.

    Its output goes to ``cache_rank.log`` in `folder`.

    Raises
    ------
    SettingsError
        If it ends, or does not answer in time.
    """
    placement = settings.rank_settings.placement
    if not placement.num_cache_ranks:
        yield
        return
    if placement.num_cache_ranks > 1:
        raise SettingsError(
            f"{placement.num_cache_ranks} cache ranks are not measured here; use cache_ranks 0, or "
            "1 with tensor_parallel 1"
        )
    config = run_dir.path / SETTINGS_FILE
    config.write_text(to_yaml(settings), encoding="utf-8")
    guard, log = Guard(), folder / "cache_rank.log"
    env = cache_rank_env(os.environ, device=settings.cache_device)
    try:
        with log.open("wb") as out:
            child = subprocess.Popen(
                list(cache_rank_argv(run_dir=run_dir.path, config=config)), env=env, stdout=out,
                stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        guard.watch(child.pid)
        try:
            _await_answer(child, run_dir, log)
            yield
        finally:
            child.kill()
            child.wait()
            guard.forget(child.pid)
    finally:
        guard.close()


def _await_answer(child: subprocess.Popen[bytes], run_dir: RunDir, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (detail := cache_rank_detail(run_dir)) is not None:
        if child.poll() is not None or time.monotonic() > deadline:
            text = log.read_text(encoding="utf-8", errors="replace").strip()
            last = text.splitlines()[-1] if text else "no output"
            raise SettingsError(f"the cache rank does not answer ({detail}): {last[:300]}")
        time.sleep(0.1)
