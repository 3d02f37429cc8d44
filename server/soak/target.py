# SPDX-License-Identifier: Apache-2.0
"""The server under load: one that is started for it, or one that runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.fault_points import FAULTS_FILE, FAULTS_VARIABLE, read_faults
from tandemkv.inference_rank.edge.keys import read_key
from tandemkv.server.checks.ports import choose_port
from tandemkv.server.launch.child_process import ChildProcess, ChildSpec
from tandemkv.server.launch.probes import server_address, server_state
from tandemkv.server.launch.sglang_command import SERVER

from .canaries import SoakError
from .client import Client
from .processes import ServerProcesses, files_below

_START_TIMEOUT_S = 900.0
_BANNER_TIMEOUT_S = 60.0
_BANNER_LINES = 1000  # `serve --verbose` goes on with the logs of its ranks
_MOST_RESTARTS = "1000"
_HOST = "127.0.0.1"
_OWN_FLAGS = (
    "--host", "--port", "--run-dir", "--api-key-file", "--admin-key-file", "--max-restarts",
)  # fmt: skip
_END_TIMEOUT_S = 90.0


@dataclass(slots=True, kw_only=True)
class Target:
    """A server, and what is known of it."""

    url: str
    client: Client
    processes: ServerProcesses | None
    is_ours: bool
    left: list[str] | None = None
    """Once it was ended: what it left behind. None if it was not ours to end."""
    exit_status: str | None = None
    segments: set[str] = field(default_factory=set)

    def point_faults(self) -> list[dict[str, float | int | str]]:
        """Return what fault points did in the server's processes."""
        run_dir = None if self.processes is None else self.processes.run_dir
        return [] if run_dir is None else read_faults(run_dir / FAULTS_FILE)


def running_target(url: str, *, api_key_file: Path | None, admin_key_file: Path | None) -> Target:
    """Return the server that runs at `url`.

    Raises `SettingsError` if that is no address, a key file cannot be used, or nobody listens
    there; `SoakError` if it is not ready.
    """
    _check_address(url)
    url = server_address(url)
    client = Client(
        url,
        api_key=read_key(api_key_file, "--api-key-file") if api_key_file else None,
        admin_key=read_key(admin_key_file, "--admin-key-file") if admin_key_file else None,
    )
    state = server_state(url, 5.0)
    if not state.ready:
        raise SoakError(f"{url} is not ready: {state.detail}")
    processes = ServerProcesses.listening_at(url)
    return Target(url=url, client=client, processes=processes, is_ours=False)


def _check_address(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        is_address = False
    if not is_address:
        raise SettingsError(f"url={url}: an address such as http://127.0.0.1:30000 is required")


@contextlib.contextmanager
def started_target(model: str, arguments: Sequence[str], *, faults: str) -> Iterator[Target]:
    """Run ``tandemkv serve MODEL`` with more arguments, and fault points, while this lasts.

    Raises `SoakError` if it does not become ready, `SettingsError` if `arguments` have a flag that
    the soak sets itself.
    """
    _check_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="tkv-soak-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        temporary, run_dir = work / "t", work / "run"
        temporary.mkdir()
        port, files = choose_port(_HOST, 0), (work / "api.key", work / "admin.key")
        api_key, admin_key = map(_new_key, files)
        own = (_HOST, str(port), str(run_dir), *map(str, files), _MOST_RESTARTS)
        flags = (text for pair in zip(_OWN_FLAGS, own, strict=True) for text in pair)
        # First, because all that follows a -- in `arguments` is SGLang's.
        argv = (*SERVER, "serve", model, *flags, *arguments)
        env = dict(os.environ) | {"TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
        if faults:
            env[FAULTS_VARIABLE] = faults
        child = ChildProcess(
            ChildSpec(name="tandemkv serve", argv=argv, env=env, log_path=work / "serve.log")
        )
        child.start()
        url = f"http://{_HOST}:{port}"
        try:
            _await_ready(child, url)
            client = Client(url, api_key=api_key, admin_key=admin_key)
            processes = ServerProcesses(child.pid, run_dir)
            target = Target(url=url, client=client, processes=processes, is_ours=True)
            yield target
            _end(child, target, temporary)
        finally:
            child.stop(_END_TIMEOUT_S, hurry=lambda: False)


def _new_key(file: Path) -> str:
    """Return a key that is in `file` from now on, for its owner only."""
    key = secrets.token_hex(16)
    file.touch(mode=0o600)
    file.write_text(key, encoding="utf-8")
    return key


def _check_arguments(arguments: Sequence[str]) -> None:
    for argument in itertools.takewhile(lambda each: each != "--", arguments):
        name = argument.partition("=")[0]
        if name in _OWN_FLAGS:
            raise SettingsError(f"{name}: the soak sets it for the server it starts; leave it out")


def _await_ready(child: ChildProcess, url: str) -> None:
    def missing() -> str | None:
        state = server_state(url)
        return None if state.ready else state.detail

    def unsaid() -> str | None:  # once it is said it looks after its ranks
        said = "Ctrl-C stops" in child.log_tail(_BANNER_LINES)
        return None if said else "it answers, and does not say that it looks after its ranks"

    reason = child.await_ready(missing, _START_TIMEOUT_S) or child.await_ready(
        unsaid, _BANNER_TIMEOUT_S
    )
    if reason is not None:
        raise SoakError(f"{reason}\n{child.log_tail()}")


def _end(child: ChildProcess, target: Target, temporary: Path) -> None:
    """End the server as Ctrl-C does, and see what is left."""
    assert target.processes is not None
    before = [process for some in target.processes.by_role().values() for process in some]
    child.stop(_END_TIMEOUT_S, hurry=lambda: False)
    target.exit_status = child.exit_status()
    time.sleep(0.5)
    left = [f"process {process.pid}" for process in before if process.is_running()]
    left += [f"TMPDIR/{name}" for name in files_below(temporary)]
    run_dir = files_below(target.processes.run_dir)
    left += [f"run directory/{name}" for name in run_dir if ".log" not in name]
    left += [path for path in sorted(target.segments) if Path(path).exists()]
    target.left = left
