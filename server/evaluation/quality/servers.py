# SPDX-License-Identifier: Apache-2.0
"""Servers under measurement: ``tandemkv serve`` or stock SGLang, each a child with its own port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError, TandemKVError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import PROBE_VARIABLE
from tandemkv.server.checks.ports import choose_port
from tandemkv.server.launch.child_process import ChildProcess, ChildSpec
from tandemkv.server.launch.probes import fetch_status, server_state
from tandemkv.server.launch.sglang_command import SERVER, common_env, sglang_argv
from tandemkv.server.launch.watchdog import remove_segments, shared_memory_of
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import to_yaml

_HOST = "127.0.0.1"
_TICK_S = 0.25
_REQUEST_TIMEOUT_S = 7200.0
_FLUSH_TIMEOUT_S = 30.0
_TAIL_LINES = 25
_NOT_EMPTIED = "the prefix cache cannot be emptied"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MeasurementError(TandemKVError):
    """A server did not start, or did not answer as it must."""


class NoAnswerError(MeasurementError):
    """A server does not answer at all: it has ended, most likely."""


class StoppedError(MeasurementError):
    """The user asked to stop."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    url: str
    is_stock: bool
    """Whether it is SGLang without the plugin."""
    probe_file: Path | None = None
    """Where attention probes are written, if they are."""
    log_dir: Path | None = None
    """Where its ranks' logs are; not of stock SGLang."""

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request to SGLang's native endpoint.

        Raises `MeasurementError` if the answer is not one of success.
        """
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=_REQUEST_TIMEOUT_S) as reply:
                found: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode("utf-8", errors="replace")
            raise MeasurementError(f"HTTP {error.code} from /generate: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"no answer from /generate: {error}") from error
        return found

    def forget(self) -> None:
        """Empty the prefix cache and the probe file: no task has another one's prompts or probes.

        A prompt whose prefix is cached has fewer prompt queries to seed the resident set with.
        Raises `MeasurementError` if the server still refuses after a while; it does while a request
        is running.
        """
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        request = urllib.request.Request(f"{self.url}/flush_cache", b"", method="POST")
        while True:
            try:
                with _OPENER.open(request, timeout=_FLUSH_TIMEOUT_S):
                    if self.probe_file is not None:  # nothing runs, and each line opens it anew
                        self.probe_file.unlink(missing_ok=True)
                    return
            except urllib.error.HTTPError as error:
                failure = MeasurementError(f"{_NOT_EMPTIED}: HTTP {error.code}")
            except (OSError, http.client.HTTPException) as error:
                failure = NoAnswerError(f"{_NOT_EMPTIED}: {error}")
            if time.monotonic() > deadline:
                raise failure
            time.sleep(_TICK_S)

    def start_plan(self) -> dict[str, float]:
        """Return what the inference rank measured and decided at start, by name; may be empty."""
        if self.is_stock:
            return {}
        values = fetch_status(self.url)["inference_rank"].get("values", {})
        return {key: value for key, value in values.items() if key.startswith("plan_")}

    def counters(self) -> dict[str, float]:
        """Return totals by name, with ``inference.`` or ``cache.`` before it.

        Those of several cache ranks are added up.
        """
        if self.is_stock:
            return {}
        status = fetch_status(self.url)
        inference = status["inference_rank"]
        # An engine in its process reports with the inference rank.
        ranks = {"inference": [inference], "cache": status["cache_ranks"] or [inference]}
        found: dict[str, float] = defaultdict(float)
        for rank, report in ((rank, report) for rank, some in ranks.items() for report in some):
            if "values" not in report:
                raise MeasurementError(f"{rank} rank reports no counters: {report.get('error')}")
            for name, value in report["values"].items():
                if name.endswith("_total"):
                    found[f"{rank}.{name}"] += value
        return dict(found)


@contextlib.contextmanager
def tandem_server(
    settings: ServeSettings,
    stop: threading.Event,
    *,
    probes: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Run ``tandemkv serve`` with `settings`, and more variables, while the context lasts.

    Raises `MeasurementError` if it does not become ready; the end of its logs is in the message.
    """
    with _folder() as work:
        port, config = choose_port(_HOST, 0), work / "quality.yaml"
        own = _asked_from_here(settings).model_copy(update={"port": port, "run_dir": work / "run"})
        config.write_text(to_yaml(own), encoding="utf-8")
        probe_file = work / "probes.jsonl" if probes else None
        env = _environment(settings.device) | dict(environ or {})
        if probe_file is not None:
            env[PROBE_VARIABLE] = str(probe_file)
        argv = (*SERVER, "serve", settings.model, "--config", str(config))
        server = RunningServer(
            f"http://{_HOST}:{port}", is_stock=False, probe_file=probe_file, log_dir=work / "run"
        )
        spec = ChildSpec(name="tandemkv serve", argv=argv, env=env, log_path=work / "serve.log")
        detail = partial(_ready, run_dir=work / "run")
        with _running(spec, server, settings.start_timeout_s, stop, detail):
            yield server


@contextlib.contextmanager
def stock_server(
    settings: ServeSettings,
    *,
    model_dir: Path,
    device: str,
    dtype: str,
    stop: threading.Event,
    more_args: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """Run SGLang without the plugin, otherwise with the same arguments and `more_args`.

    Raises `MeasurementError` as `tandem_server` does.
    """
    if device == "cuda":  # it has no cache rank to wait for: CUDA graphs and overlap stay on
        settings = settings.model_copy(update={"cache_ranks": 0})
    with _folder() as work:
        port, own = choose_port(_HOST, 0), _asked_from_here(settings)
        given = sglang_argv(own, model_dir=model_dir, device=device, dtype=dtype, port=port)
        at = given.index("--attention-backend")
        # On a GPU stock SGLang chooses its own.
        backend = ("--attention-backend", "torch_native") if device == "cpu" else ()
        argv = (*given[:at], *backend, *given[at + 2 :], *more_args)
        server = RunningServer(f"http://{_HOST}:{port}", is_stock=True)
        env = _environment(device) | {"SGLANG_PLUGINS": "none"}
        spec = ChildSpec(name="stock SGLang", argv=argv, env=env, log_path=work / "sglang.log")
        with _running(spec, server, settings.start_timeout_s, stop, _healthy):
            yield server


def _asked_from_here(settings: ServeSettings) -> ServeSettings:
    """Return `settings` with an address on loopback and no keys, whatever is served with them."""
    edge = settings.edge.model_copy(update={"api_key_file": None, "admin_key_file": None})
    return settings.model_copy(update={"host": _HOST, "edge": edge})


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = tempfile.TemporaryDirectory(prefix="tkv-q-", ignore_cleanup_errors=True)
    try:
        yield Path(folder.name)
    finally:
        with _interrupted_later():
            folder.cleanup()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM stop as Ctrl-C does, also where a shell's job has SIGINT ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _interrupted_later() -> Iterator[Callable[[], bool]]:
    """Put off a Ctrl-C until what is done here is complete; yields whether one came.

    Only the main thread gets them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if came.is_set():
        raise KeyboardInterrupt


def _environment(device: str) -> dict[str, str]:
    device = "cuda" if device == "cuda" else "cpu"
    env = common_env(os.environ, device=device) | {"HF_HUB_OFFLINE": "1"}
    env.pop(PROBE_VARIABLE, None)
    return env | ({"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {})


@contextlib.contextmanager
def _running(
    spec: ChildSpec,
    server: RunningServer,
    timeout_s: float,
    stop: threading.Event,
    detail: Callable[[RunningServer], str | None],
) -> Iterator[None]:
    def missing() -> str | None:
        if stop.is_set():
            raise StoppedError("stopped")
        return detail(server)

    child, ending = ChildProcess(spec), threading.Lock()
    child.start()
    watcher = threading.Thread(target=_end_when_asked, args=(child, stop, ending), daemon=True)
    watcher.start()
    try:
        reason = child.await_ready(missing, timeout_s, setting="start_timeout_s")
        if reason is not None:
            raise MeasurementError(f"{reason}\n{_log_tails(child)}")
        try:
            yield
        except MeasurementError as error:
            if stop.is_set():
                raise StoppedError("stopped") from error
            raise MeasurementError(f"{error}\n{_log_tails(child)}") from error
    finally:
        _end(child, 30.0, ending)
        watcher.join(1.0)


def _log_tails(child: ChildProcess) -> str:
    """Return the ends of all logs: the child's, and those of the ranks below it."""
    paths = [child.spec.log_path, *sorted(child.spec.log_path.parent.glob("run/*.log"))]
    found = []
    for path in paths:
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace").rstrip()
            found.append("\n".join([f"-- {path.name}", *text.splitlines()[-_TAIL_LINES:]]))
    return "\n".join(found)


def _end_when_asked(child: ChildProcess, stop: threading.Event, ending: threading.Lock) -> None:
    """End the server when the user stops, so that requests under way fail at once."""
    while child.exit_status() is None:
        if stop.wait(_TICK_S):
            _end(child, 10.0, ending)
            return


def _end(child: ChildProcess, grace_s: float, ending: threading.Lock) -> None:
    """End a server, and remove the shared memory that stock SGLang leaves.

    `ending` is held meanwhile: that is for one thread at a time. A Ctrl-C meanwhile kills it.
    """
    with _interrupted_later() as is_interrupted, ending:
        segments = shared_memory_of([child.pid])
        child.stop(grace_s, hurry=is_interrupted)
        remove_segments(segments)


def _ready(server: RunningServer, run_dir: Path) -> str | None:
    try:
        instance = RunDir.open(run_dir).instance
    except SettingsError as error:
        return str(error)  # not made yet
    state = server_state(server.url, instance=instance)
    return None if state.ready else state.detail


def _healthy(server: RunningServer) -> str | None:
    try:
        with _OPENER.open(f"{server.url}/health", timeout=5.0) as reply:
            return None if reply.status == 200 else f"HTTP {reply.status}"
    except (OSError, http.client.HTTPException) as error:
        return str(error)
