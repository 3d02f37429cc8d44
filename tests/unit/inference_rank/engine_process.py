# SPDX-License-Identifier: Apache-2.0
"""The cache rank as a process that tests start often: a copy of one that has imported it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_SPAWNER = multiprocessing.get_context("forkserver")
_SPAWNER.set_forkserver_preload(["tandemkv.cache_rank.process"])


def start_engine(run_dir: Path, model_dir: Path, settings: str, rank: int = 0) -> BaseProcess:
    """Start one that waits for its turn; `settings` is JSON, `rank` its number."""
    arguments = run_dir, model_dir, settings, rank
    process = _SPAWNER.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    return process


def _serve(run_dir: Path, model_dir: Path, settings: str, rank: int) -> None:
    from tandemkv.cache_rank.process import run_cache_rank
    from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run_cache_rank(
        run_dirs=[run_dir],
        model_dir=model_dir,
        max_rows=3,
        standby=True,
        settings=RankSettings.model_validate_json(settings),
        rank=rank,
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
