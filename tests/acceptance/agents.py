# SPDX-License-Identifier: Apache-2.0
"""How tests start torchrun: its rendezvous is a file, so it listens nowhere."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from nothing_lost import wait_for
from rank_servers import SIZES, Server, environment, free_port, model_dir, ours, with_device

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MODULE = "tandemkv.server.torchrun"
NEAR, FAR = "127.0.0.1", "127.0.0.2"


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


def schedulers(worker: psutil.Process) -> list[psutil.Process]:
    """Return SGLang's schedulers below one of torchrun's processes."""
    below = worker.children(recursive=True)
    return [child for child in below if "sglang::scheduler" in " ".join(child.cmdline())]


@dataclass(frozen=True)
class Nodes:
    """A server over two nodes: its agent is node 0's, and `agent` that of node 1."""

    server: Server
    agent: psutil.Process
    far_url: str
    far_run_dir: Path

    @property
    def agents(self) -> tuple[psutil.Process, psutil.Process]:
        """The agents of both nodes."""
        return psutil.Process(self.server.pid), self.agent

    def processes(self) -> list[psutil.Process]:
        """All of them on both nodes, agents included."""
        return [p for agent in self.agents for p in (agent, *agent.children(recursive=True))]


@contextlib.contextmanager
def two_nodes(
    settings: dict[str, Any],
    *,
    processes: int,
    device: str = "cpu",
    environs: tuple[dict[str, str], dict[str, str]] = ({}, {}),
) -> Iterator[Nodes]:
    """Serve with `settings` over two nodes, whose agents start so many `processes` each.

    The nodes are two loopback addresses; `environs` are what their processes find besides.
    """
    work = Path(tempfile.mkdtemp(prefix="tkv-"))  # short: sockets lie in it
    config, run_dir, port = work / "node1.yaml", work / "node1", free_port()
    config.write_text(yaml.safe_dump(SIZES | settings))
    places = ENVIRONMENT | {"TMPDIR": str(work), "XDG_RUNTIME_DIR": str(work)}
    near, far = (torchrun(work / "store", processes, nodes=2, node=name) for name in (NEAR, FAR))
    options = ("--device", device, "--config", str(config), "--port", str(port))
    argv = [*far, model_dir(), *options, "--run-dir", str(run_dir)]
    try:
        with (
            other_agent(argv, work, with_device(places | environs[1], device)) as pid,
            ours(settings, environ=places | environs[0], start=near, device=device) as server,
        ):
            log = work / "far.log"
            wait_for(lambda: "node 0 serves" in log.read_text(), "node 1 is not ready", 30.0)
            yield Nodes(server, psutil.Process(pid), f"http://127.0.0.1:{port}", run_dir)
    finally:
        shutil.rmtree(work)
