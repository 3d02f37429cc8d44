# SPDX-License-Identifier: Apache-2.0
"""What a container of a manifest runs, as a process on this machine.

Where the kernel allows it each has PIDs, IPC objects and a /dev/shm of its own, as in a container;
those that have no port also no network. There is no image, and the root is this machine's.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rank_servers import environment

_APART = (
    *("unshare", "--user", "--map-current-user", "--pid", "--ipc", "--mount", "--mount-proc"),
    *("--fork", "--kill-child"),
)
_WITH_SHM = ("sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "container")
_PATIENCE_S = 60.0


@functools.cache
def can_be_apart() -> bool:
    """Whether this machine lets us make namespaces."""
    try:
        made = subprocess.run(
            [*_APART, "--net", "--", *_WITH_SHM, "true"], capture_output=True, timeout=20.0
        )
    except OSError:
        return False
    return made.returncode == 0


class Container:
    """One container, restarted by hand.

    Parameters
    ----------
    spec : dict
        Of a pod's manifest.
    paths : Mapping[str, Path]
        Where this machine has the mounts.
    work : Path
        For its log and temporary files.
    """

    def __init__(self, spec: dict[str, Any], paths: Mapping[str, Path], work: Path) -> None:
        self.name: str = spec["name"]
        self._spec, self._paths = spec, paths
        self.log = work / f"{self.name}.log"
        self._temporary = work / f"tmp-{self.name}"
        self._temporary.mkdir()
        self._popen: subprocess.Popen[bytes] | None = None
        self._main: psutil.Process | None = None

    @property
    def main(self) -> psutil.Process:
        """Its first process."""
        assert self._main is not None
        return self._main

    def start(self) -> None:
        """Start it for the first time, or again."""
        assert self._popen is None
        argv = self._argv(["tandemkv", *self._spec["args"]])
        if can_be_apart():
            network = () if "ports" in self._spec else ("--net",)
            argv = [*_APART, *network, "--", *_WITH_SHM, *argv]
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                argv, env=self._environ(), stdout=output, stderr=subprocess.STDOUT, cwd="/"
            )
        self._main = psutil.Process(self._popen.pid)
        if can_be_apart():
            deadline = time.monotonic() + _PATIENCE_S
            while not (below := self._main.children()):
                assert time.monotonic() < deadline, self.text
                time.sleep(0.02)
            self._main = below[0]

    def probe(self, kind: str) -> int:
        """Run its exec probe, and return the exit code."""
        command = self._spec[kind]["exec"]["command"]
        return subprocess.run(
            self._argv(command),
            env=self._environ(),
            capture_output=True,
            timeout=self._spec[kind]["timeoutSeconds"],
            cwd="/",
        ).returncode

    def await_start(self) -> None:
        """Return once its startup probe, an exec probe, has passed."""
        probe = self._spec["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            if self.probe("startupProbe") == 0:
                return
            assert self.is_running, self.text
            time.sleep(0.2)
        raise AssertionError(f"{self.name} does not start:\n{self.text}")

    @property
    def is_running(self) -> bool:
        """Whether its first process lives."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def text(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """SIGKILL its first process; all others of it die with that, as in a container."""
        if self._popen is None:
            return
        every = [self.main, *self.main.children(recursive=True)] if self.main.is_running() else []
        for process in every if not can_be_apart() else every[:1]:
            process.kill()
        self._ended(_PATIENCE_S)

    def stop(self, grace_s: float) -> None:
        """End it as a kubelet does: SIGTERM, and SIGKILL after `grace_s`, which fails the test."""
        self.main.send_signal(signal.SIGTERM)
        try:
            self._ended(grace_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise AssertionError(f"{self.name} outlived {grace_s:g} s:\n{self.text}") from error

    def _ended(self, timeout_s: float) -> None:
        assert self._popen is not None
        self._popen.wait(timeout_s)
        self._popen = None

    def _argv(self, command: list[str]) -> list[str]:
        program, *words = command
        assert program == "tandemkv"
        for mount, path in self._paths.items():
            words = [word.replace(f"{mount}/", f"{path}/") for word in words]
        return [sys.executable, "-P", "-m", "tandemkv.server", *words]

    def _environ(self) -> dict[str, str]:
        given = {item["name"]: item["value"] for item in self._spec.get("env", ())}
        return environment() | given | {"TMPDIR": str(self._temporary)}


def namespaces(process: psutil.Process) -> dict[str, str]:
    """Return what a process shares with others, by kind."""
    return {
        kind: str(Path(f"/proc/{process.pid}/ns/{kind}").readlink())
        for kind in ("pid", "ipc", "mnt", "net")
    }
