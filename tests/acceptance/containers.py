# SPDX-License-Identifier: Apache-2.0
"""What a container of a manifest runs, as a process on this machine.

Where the kernel allows it each has PIDs, IPC objects and a /dev/shm of its own, as in a container;
those that have no port also no network. There is no image, and the root is this machine's.
"""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rank_servers import Server, environment

_APART = (
    *("unshare", "--user", "--map-current-user", "--pid", "--ipc", "--mount", "--mount-proc"),
    *("--fork", "--kill-child"),
)
_MOUNT = (
    'mount -t tmpfs shm /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"',
    "container",
)
_PATIENCE_S, _READY_S = 60.0, 180.0


def _apart(hosts: Path, *, has_network: bool) -> list[str]:
    """Return how a command line begins that is run as in a container, with these `hosts`."""
    network = () if has_network else ("--net",)
    return [*_APART, *network, "--", "sh", "-c", *_MOUNT, str(hosts)]


@functools.cache
def can_be_apart() -> bool:
    """Whether this machine lets us make namespaces."""
    argv = [*_apart(Path("/etc/hosts"), has_network=False), "true"]
    try:
        made = subprocess.run(argv, capture_output=True, timeout=20.0)
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
    address : str
        IP address of its pod.
    hosts : Path
        What names of hosts lead to, where it can be apart (`can_be_apart`).
    """

    def __init__(
        self,
        spec: dict[str, Any],
        paths: Mapping[str, Path],
        work: Path,
        *,
        address: str = "127.0.0.1",
        hosts: Path = Path("/etc/hosts"),
    ) -> None:
        self.name: str = spec["name"]
        self._spec, self._paths, self._address, self._hosts = spec, paths, address, hosts
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
        argv = self._argv([*self._spec.get("command", ["tandemkv"]), *self._spec["args"]])
        if can_be_apart():
            argv = [*_apart(self._hosts, has_network="ports" in self._spec), *argv]
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

    def run(self) -> None:
        """Start it and wait until it ends, as an init container does."""
        argv = self._argv([*self._spec["command"], *self._spec["args"]])
        subprocess.run(argv, env=self._environ(), check=True, timeout=_PATIENCE_S, cwd="/")

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
    def readiness_route(self) -> str:
        """What its readiness probe, one over HTTP, asks for."""
        return str(self._spec["readinessProbe"]["httpGet"]["path"])

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
        """End it as a kubelet does: SIGTERM, and then `await_end`."""
        self.main.send_signal(signal.SIGTERM)
        self.await_end(grace_s)

    def await_end(self, grace_s: float) -> None:
        """Return once it has ended; after `grace_s` it is killed, which fails the test."""
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
        for mount, path in self._paths.items():
            words = [word.replace(f"{mount}/", f"{path}/") for word in words]
        given = self._given()
        words = [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in words]
        if program == "tandemkv":
            return [sys.executable, "-P", "-m", "tandemkv.server", *words]
        return [program, *words]

    def _given(self) -> dict[str, str]:
        """Return the variables that the manifest names."""
        fields = {
            "status.podIP": self._address,
            "metadata.labels['apps.kubernetes.io/pod-index']": "0",  # of the only one
        }
        return {
            item["name"]: item["value"]
            if "value" in item
            else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
            for item in self._spec.get("env", ())
        }

    def _environ(self) -> dict[str, str]:
        # Threads are for the cores that a container asks for, which are not here.
        here = {"TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"}
        return environment() | self._given() | here


def await_ready(server: Server, *containers: Container) -> None:
    """Return once the readiness probe of the last of `containers` passes at `server`."""
    route, deadline = containers[-1].readiness_route, time.monotonic() + _READY_S
    while True:
        for each in containers:
            assert each.is_running, each.text
        with suppress(OSError):
            if server.get(route, 5.0)[0] == 200:
                return
        assert time.monotonic() < deadline, containers[-1].text
        time.sleep(0.1)


def namespaces(process: psutil.Process) -> dict[str, str]:
    """Return what a process shares with others, by kind."""
    return {
        kind: str(Path(f"/proc/{process.pid}/ns/{kind}").readlink())
        for kind in ("pid", "ipc", "mnt", "net")
    }
