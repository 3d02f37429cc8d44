# SPDX-License-Identifier: Apache-2.0
"""torchrun's process, or processes in its place, over fake ranks (`fake_torchrun`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

SCRIPT = Path(__file__).with_name("fake_torchrun.py")
PATIENCE_S = 60.0
OPTIONS = (
    *("smollm2", "--device", "cpu", "--cache-tokens", "4096", "--max-context", "2048"),
    *("--max-restarts", "1", "--drain-timeout-s", "2"),
)


class Launched:
    """torchrun's process, or processes in its place, over fake ranks in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / "output.log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def environment(self, **more: str) -> dict[str, str]:
        of_torchrun = ("TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(of_torchrun)}
        return env | {"XDG_RUNTIME_DIR": str(self.root), "TMPDIR": str(self.root)} | more

    def start(self, argv: list[str], **more: str) -> None:
        with self.output.open("ab") as file:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", *argv],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.environment(**more),
                    start_new_session=True,
                )
            )

    def start_torchrun(self, max_restarts: int) -> None:
        self.start(
            [
                *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
                *("--max-restarts", str(max_restarts)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(self.root / "store")),
                *("--rdzv-conf", "store_type=file", str(SCRIPT), str(self.root), "serve", *OPTIONS),
            ],
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def start_workers(self, cache_mode: str, *options: str, count: int = 2, nodes: int = 1) -> None:
        """Start what torchrun would, on as many `nodes`; the test is the agent of each."""
        here = count // nodes
        for rank in range(count):
            self.start(
                [str(SCRIPT), str(self.root), cache_mode, *OPTIONS, *options],
                RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_RANK=str(rank % here),
                LOCAL_WORLD_SIZE=str(here),
                GROUP_RANK=str(rank // here),
                GROUP_WORLD_SIZE=str(nodes),
                TORCHELASTIC_RUN_ID="none",
                TORCHELASTIC_RESTART_COUNT="0",
            )

    def text(self) -> str:
        return self.output.read_text()

    def pids(self, name: str = "") -> list[int]:
        path = self.root / "pids"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(name)]

    def workers(self) -> list[psutil.Process]:
        """By rank."""
        below = psutil.Process(self.processes[0].pid).children()
        return sorted(below, key=lambda process: int(process.environ()["RANK"]))

    def run_dirs(self) -> list[Path]:
        return list(self.root.glob("tandemkv-*"))

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait_ready(self, count: int = 1) -> None:
        def is_ready() -> bool:
            assert not any(process.poll() for process in self.processes), self.text()
            return self.text().count("Ctrl-C stops") == count

        self.wait_for(is_ready)

    def wait(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.processes]

    def assert_nothing_left(self, *more: psutil.Process) -> None:
        def is_alive(pid: int) -> bool:
            try:
                return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        pids = [*self.pids(), *(process.pid for process in more)]
        self.wait_for(lambda: not any(map(is_alive, pids)))
        self.wait_for(lambda: not self.run_dirs())


@contextlib.contextmanager
def launched_processes() -> Iterator[Launched]:
    """Give a place to launch in, and end whatever is left there."""
    root = Path(tempfile.mkdtemp(prefix="tkv-"))  # short: sockets lie in it
    found = Launched(root)
    try:
        yield found
    finally:
        left = [*found.pids()]
        for process in found.processes:
            if process.poll() is None:
                left += [
                    child.pid for child in psutil.Process(process.pid).children(recursive=True)
                ]
                process.kill()
            process.wait()
        for pid in left:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(root)
