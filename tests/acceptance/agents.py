# SPDX-License-Identifier: Apache-2.0
"""How tests start torchrun: its rendezvous is a file, so it listens nowhere."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
from rank_servers import environment

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


@contextlib.contextmanager
def other_agent(argv: Sequence[str], work: Path, environ: dict[str, str]) -> Iterator[int]:
    """Run an agent of another node; gives its process id. Its log is ``far.log`` in `work`."""
    with (work / "far.log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-P", *argv],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment() | environ,
            cwd="/",
        )
    try:
        yield agent.pid
    finally:
        if agent.poll() is None:
            left = psutil.Process(agent.pid).children(recursive=True)
            for process in (psutil.Process(agent.pid), *left):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        agent.wait()


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
