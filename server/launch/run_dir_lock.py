# SPDX-License-Identifier: Apache-2.0
"""One launch in a run directory at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import CacheRankError, SettingsError
from tandemkv.cache_rank.protocol.ipc import take_lock
from tandemkv.cache_rank.protocol.run_dir import RunDir

_LOCK_WAIT_S, _LOCK_PAUSE_S = 8.0, 0.1
"""The watchdog of a launch that was killed removes its files for five seconds and a little."""


@contextmanager
def lock_run_dir(path: Path | None) -> Iterator[int | None]:
    """Be the one launch in the run directory `path`, which is made; another may be loading there.

    Yields a descriptor, which the launch's watchdog keeps open until it has removed what a launch
    left that was killed. None without a path: the directory is a fresh one. Raises `SettingsError`
    if another launch is there.
    """
    if path is None:
        yield None
        return
    file, deadline = RunDir.create(path).path / "launcher", time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            handle = take_lock(file)
            if _is_at(handle, Path(f"{file}.lock")):
                break
            os.close(handle)  # of a launch that has removed it since: there is another by now
        except CacheRankError as error:
            if time.monotonic() > deadline:
                raise SettingsError(
                    f"run_dir={path}: another launch is there; stop it or give another --run-dir"
                ) from error
            time.sleep(_LOCK_PAUSE_S)
    try:
        yield handle
    finally:
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
