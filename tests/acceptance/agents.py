# SPDX-License-Identifier: Apache-2.0
"""How tests start torchrun: its rendezvous is a file, so it listens nowhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MODULE = "tandemkv.server.torchrun"


def torchrun(
    store: Path, processes: int, *, nodes: int = 1, node: str = "localhost"
) -> tuple[str, ...]:
    """Return arguments of Python that start an agent with so many `processes` of ours.

    The names of `nodes`, in their order, give the ranks.
    """
    return (
        *("-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--nnodes", str(nodes), "--local-addr", node),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(store)),
        *("--rdzv-conf", "store_type=file", "-m", MODULE),
    )


def workers(agent: int) -> list[psutil.Process]:
    """Return the processes that an agent started, by rank."""
    below = psutil.Process(agent).children()
    return sorted(below, key=lambda process: int(process.environ()["RANK"]))


def segments_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of /dev/shm that `processes` have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {item.path for item in process.memory_maps()}
    return {Path(path) for path in found if path.startswith("/dev/shm/")}
