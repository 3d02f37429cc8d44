# SPDX-License-Identifier: Apache-2.0
"""``tandemkv memory``: hold the memory of two ranks that something else starts and restarts.

What the launcher does for the ranks of ``tandemkv serve``, as a process of its own: a container of
the ranks' pod, say. It maps none of the memory, and imports no torch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.run_dir import RunDir

_STOP = (signal.SIGTERM, signal.SIGINT)


def hold_memory(path: Path, progress: Callable[[str], None]) -> None:
    """Hold what the ranks of the run directory `path` hand over, until SIGTERM or SIGINT.

    Call it from the main thread. The run directory `path` is made if it is not there yet;
    `progress` is told once memory is taken.

    Raises
    ------
    SettingsError
        If the directory cannot be used.
    CacheRankError
        If another live process holds memory there.
    """
    run_dir = RunDir.create(path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # also in the holder's thread
    try:
        holder = DescriptorHolder(run_dir.holder_socket, run_dir.token)
        try:
            progress(f"holding memory for the ranks of {run_dir.path}")
            signal.sigwait(_STOP)
        finally:
            holder.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
