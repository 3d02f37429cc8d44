# SPDX-License-Identifier: Apache-2.0
"""Real servers for tests: ours through the CLI, and stock SGLang with the same flags."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

MODEL = "smollm2"
CHUNK_TOKENS = 2048
CAPACITY_TOKENS = 40_000
START_TIMEOUT_S = 400.0
SMALL_SELECTION = {
    "policy": "look_ahead",
    "budget_tokens": 96,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 8,
}
"""Resident sets much smaller than most prompts of the end-to-end tests."""
SIZES = {
    "max_running_requests": 6,
    "chunked_prefill_size": CHUNK_TOKENS,
    "cache": {"capacity_tokens": CAPACITY_TOKENS},
}
"""Settings that `ours` starts with, unless it is given others."""
CPU_FLAGS = (
    *("--device", "cpu", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
    *("--dtype", "float32", "--page-size", "1", "--sleep-on-idle"),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", str(CAPACITY_TOKENS)),
)


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    pid: int
    log: Path
    run_dir: Path | None = None
    admin_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an administrator: tests empty the cache and abort requests."""
        key = {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        return {"content-type": "application/json"} | key

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, Any]:
        """GET, returning (status code, JSON or text)."""
        return _call(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 900.0) -> tuple[int, Any]:
        """POST JSON, returning (status code, JSON or text)."""
        data = json.dumps(body).encode()
        return _call(urllib.request.Request(self.url + path, data, self.headers), timeout_s)

    def generate(self, **body: Any) -> dict[str, Any]:
        """Call SGLang's native endpoint; fails the test on anything but 200."""
        code, found = self.post("/generate", body)
        assert code == 200, f"HTTP {code}: {found}"
        assert isinstance(found, dict)
        return found

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters of the inference rank and of the cache rank (none if in-process)."""
        code, found = self.get("/tandemkv/status")
        assert code == 200, found
        cache_ranks = found["cache_ranks"]
        return found["inference_rank"]["values"], cache_ranks[0]["values"] if cache_ranks else {}

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def cache_rank_pid(self) -> int:
        """Process id of the cache rank, of several the first one's."""
        found = self.cache_rank_pids()
        assert found, "no cache rank process"
        return found[0]

    def cache_rank_pids(self) -> list[int]:
        """Process ids of cache ranks, by their numbers; not of launches of those behind pumps."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "cache-rank" in words and "--address" not in words:
                    number = words[words.index("--rank") + 1] if "--rank" in words else 0
                    found.append((int(number), process.pid))
        return [pid for _, pid in sorted(found)]


def _call(request: urllib.request.Request, timeout_s: float) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            code, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        code, text = error.code, error.read().decode()
    try:
        return code, json.loads(text)
    except ValueError:
        return code, text


def free_port() -> int:
    """Return a port that is free on loopback now, and that no other socket gets by chance.

    A server binds it half a minute later: by then, one of those that the kernel hands out may
    belong to somebody else's connection.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port in 100 tries between 20000 and 32000")


def environment() -> dict[str, str]:
    """Environment of the servers: one thread each, no hub, nothing that was calibrated here."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TANDEMKV_SERVE_CALIBRATED": "false",
    }


def with_device(environ: dict[str, str], device: str) -> dict[str, str]:
    """Return what a server on `device` finds besides `environment`."""
    return environ | ({} if device == "cpu" else {"SGLANG_USE_CPU_ENGINE": "0"})


def model_dir() -> str:
    """Directory of the embedded model, or of TANDEMKV_TEST_MODEL."""
    given = os.environ.get("TANDEMKV_TEST_MODEL")
    if given:
        return given
    from tandemkv.server.models.embedded_model import embedded_model_dir

    return str(embedded_model_dir())


@contextlib.contextmanager
def ours(
    settings: dict[str, Any] | None = None,
    *,
    environ: dict[str, str] | None = None,
    start: Sequence[str] = ("-m", "tandemkv.server", "serve"),
    device: str = "cpu",
) -> Iterator[Server]:
    """Start ``tandemkv serve`` with a settings tree; ends it as Ctrl-C does.

    `start` are arguments of Python that start the same another way.
    """
    work = Path(tempfile.mkdtemp(prefix="tkv-"))
    port, run_dir = free_port(), work / "run"
    admin_key = secrets.token_hex(16)
    key_file = work / "admin.key"
    with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(admin_key)
    edge = {"admin_key_file": str(key_file)} | (settings or {}).get("edge", {})
    tree = SIZES | (settings or {}) | {"edge": edge}
    config = work / "settings.yaml"
    config.write_text(yaml.safe_dump(tree))
    argv = [
        *(sys.executable, "-P", *start, model_dir(), "--device", device),
        *("--config", str(config), "--port", str(port), "--run-dir", str(run_dir)),
    ]
    with _running(
        argv, work / "serve.log", signal.SIGINT, with_device(environ or {}, device)
    ) as pid:
        server = Server(f"http://127.0.0.1:{port}", pid, work / "serve.log", run_dir, admin_key)
        _wait(server, "/tandemkv/ready")
        yield server


@contextlib.contextmanager
def stock(*more: str) -> Iterator[Server]:
    """Start stock SGLang with its torch_native backend, the same flags and some `more`."""
    work = Path(tempfile.mkdtemp(prefix="tkv-stock-"))
    port = free_port()
    argv = [
        *(sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", model_dir()),
        *("--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(port)),
        *CPU_FLAGS,
        *("--max-running-requests", "6"),
        *more,
    ]
    with _running(argv, work / "sglang.log", signal.SIGTERM) as pid:
        server = Server(f"http://127.0.0.1:{port}", pid, work / "sglang.log")
        _wait(server, "/health")
        yield server


@contextlib.contextmanager
def _running(
    argv: list[str], log: Path, stop: signal.Signals, environ: dict[str, str] | None = None
) -> Iterator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment() | (environ or {}),
            cwd="/",
        )
    try:
        yield process.pid
    finally:
        below = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        if process.poll() is None:
            process.send_signal(stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for left in [p for p in below if p.is_running()]:
            with contextlib.suppress(psutil.Error):
                left.kill()
        if process.poll() is None:
            process.kill()
            process.wait(10)


def _wait(server: Server, path: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if server.get(path, 5.0)[0] == 200:
                return
        except OSError:
            pass
        if not psutil.pid_exists(server.pid) or (
            psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
        ):
            break
        time.sleep(0.5)
    raise AssertionError(f"server did not start:\n{server.log.read_text()[-3000:]}")
