# SPDX-License-Identifier: Apache-2.0
"""Children under measurement: their command lines, and what happens when they end or must."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandemkv.server.evaluation.quality import servers
from tandemkv.server.evaluation.quality.servers import MeasurementError, RunningServer, StoppedError
from tandemkv.server.launch.child_process import ChildSpec
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import load_settings

SERVER = RunningServer("http://127.0.0.1:1", is_stock=True)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ChildSpec, str]]:
    """What would have been started, with the settings file it would have read."""
    found: list[tuple[ChildSpec, str]] = []

    @contextlib.contextmanager
    def pretend(spec: ChildSpec, *_: Any) -> Iterator[None]:
        config = spec.argv[-1] if spec.argv[-2] == "--config" else ""
        found.append((spec, Path(config).read_text() if config else ""))
        yield

    monkeypatch.setattr(servers, "_running", pretend)
    monkeypatch.setenv("TANDEMKV_SERVE_PORT", "1")
    monkeypatch.setenv(servers.PROBE_VARIABLE, "elsewhere")
    return found


def test_ours_reads_its_settings_from_a_file_and_not_from_here(
    specs: list[Any], tmp_path: Path
) -> None:
    settings = ServeSettings.model_validate({"model": "m", "device": "cpu", "evaluation": True})
    with servers.tandem_server(settings, threading.Event(), probes=True) as server:
        (spec, config), *_ = specs
        tree = yaml.safe_load(config)
        assert server.url.endswith(f":{tree['port']}")
        file = tmp_path / "settings.yaml"
        file.write_text(config)
        assert load_settings({}, {}, file).evaluation
        assert spec.env[servers.PROBE_VARIABLE] == str(server.probe_file)
        assert "TANDEMKV_SERVE_PORT" not in spec.env
        folder = spec.log_path.parent
        assert folder.is_dir()
    assert not folder.exists()
    with servers.tandem_server(settings, threading.Event()):
        assert servers.PROBE_VARIABLE not in specs[1][0].env


def test_servers_are_asked_on_loopback_without_a_key_whatever_is_served(
    specs: list[Any], tmp_path: Path
) -> None:
    keys = {"api_key_file": "api.key", "admin_key_file": "admin.key"}
    served = {"host": "10.0.0.5", "allow_remote": True, "edge": {**keys, "max_n": 3}}
    settings = ServeSettings.model_validate({"model": "m", "device": "cpu", **served})
    options: dict[str, Any] = {"model_dir": Path("/m"), "device": "cpu", "dtype": "float32"}
    with servers.tandem_server(settings, threading.Event()) as server:
        assert server.url.startswith("http://127.0.0.1:")
    with servers.stock_server(settings, stop=threading.Event(), **options):
        pass
    (_, config), (stock, _) = specs
    (tmp_path / "settings.yaml").write_text(config)
    own = load_settings({}, {}, tmp_path / "settings.yaml")
    assert own.host == "127.0.0.1"
    assert own.edge == settings.edge.model_copy(update=dict.fromkeys(keys))
    assert stock.argv[stock.argv.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(("device", "backend"), [("cpu", "torch_native"), ("cuda", None)])
def test_stock_differs_by_the_attention_backend_alone(
    specs: list[Any], device: str, backend: str | None
) -> None:
    settings = ServeSettings.model_validate({"model": "m", "max_running_requests": 3})
    options: dict[str, Any] = {"model_dir": Path("/m"), "device": device, "dtype": "float32"}
    with servers.stock_server(settings, stop=threading.Event(), **options):
        pass
    ((spec, _),) = specs
    assert "tandemkv" not in spec.argv
    given = spec.argv.index("--attention-backend") if backend else None
    assert (given is None) == ("--attention-backend" not in spec.argv)
    assert given is None or spec.argv[given + 1] == backend
    assert spec.argv[spec.argv.index("--max-running-requests") + 1] == "3"
    assert spec.env["SGLANG_PLUGINS"] == "none"


def test_stock_on_a_gpu_keeps_its_graphs_whatever_cache_rank_ours_has(specs: list[Any]) -> None:
    settings = ServeSettings.model_validate({"model": "m", "cache_ranks": 1})
    options: dict[str, Any] = {"model_dir": Path("/m"), "device": "cuda", "dtype": "bfloat16"}
    with servers.stock_server(settings, stop=threading.Event(), **options):
        pass
    ((spec, _),) = specs
    assert "--disable-cuda-graph" not in spec.argv
    assert "--disable-overlap-schedule" not in spec.argv


def child(tmp_path: Path, code: str) -> ChildSpec:
    return ChildSpec(
        name="it",
        argv=(sys.executable, "-c", code),
        env=dict(os.environ),
        log_path=tmp_path / "it.log",
    )


def test_a_child_that_ends_shows_the_ends_of_all_logs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cache_rank.log").write_text("out of memory\n")
    spec = child(tmp_path, "print('boom'); raise SystemExit(3)")
    with (
        pytest.raises(MeasurementError, match=r"exit code 3\n-- it\.log\nboom\n(.|\n)*of memory"),
        servers._running(spec, SERVER, 60.0, threading.Event(), lambda _: "not yet"),
    ):
        raise AssertionError("it never became ready")


def test_a_child_that_does_not_become_ready_is_given_up(tmp_path: Path) -> None:
    spec = child(tmp_path, "import time; time.sleep(600)")
    with (
        pytest.raises(MeasurementError, match=r"not ready after 0\.1 s .*: because"),
        servers._running(spec, SERVER, 0.1, threading.Event(), lambda _: "because"),
    ):
        raise AssertionError("it never became ready")


def test_shared_memory_that_stock_sglang_leaves_is_removed(tmp_path: Path) -> None:
    segment, mapped = Path(f"/dev/shm/sglang_loads_{secrets.token_hex(6)}.shm"), tmp_path / "mapped"
    code = (
        "import mmap, pathlib, time\n"
        f"file = open({str(segment)!r}, 'w+b')\n"
        "file.truncate(4096)\n"
        "held = mmap.mmap(file.fileno(), 4096)\n"
        f"pathlib.Path({str(mapped)!r}).touch()\n"
        "time.sleep(600)"
    )

    def detail(_: servers.RunningServer) -> str | None:
        return None if mapped.exists() else "not mapped"

    spec = child(tmp_path, code)
    with servers._running(spec, SERVER, 60.0, threading.Event(), detail):
        assert segment.exists()
    assert not segment.exists()


def test_stopping_ends_the_child_and_the_request_under_way(tmp_path: Path) -> None:
    stop, spec = threading.Event(), child(tmp_path, "import time; time.sleep(600)")

    def ask() -> None:
        with servers._running(spec, SERVER, 60.0, stop, lambda _: None):
            stop.set()
            time.sleep(0.1)
            raise MeasurementError("no answer")

    with pytest.raises(StoppedError):
        ask()


@pytest.fixture
def foreground() -> Iterator[None]:
    """Take Ctrl-C, which what a shell starts behind itself ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("foreground")
def test_a_second_ctrl_c_kills_the_child_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ready, main = tmp_path / "ready", os.getpid()
    code = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    before = signal.getsignal(signal.SIGINT)
    second = threading.Timer(0.5, os.kill, (main, signal.SIGINT))

    def be_interrupted() -> None:
        with (
            servers._folder() as work,
            servers._running(
                child(work, code), SERVER, 60.0, threading.Event(),
                lambda _: None if ready.exists() and ready.read_text() else "not yet",
            ),
        ):  # fmt: skip
            second.start()
            os.kill(main, signal.SIGINT)
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    second.join()
    assert time.monotonic() - started < 20
    assert not Path("/proc", ready.read_text()).exists(), "it could still write into its folder"
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_while_all_is_well_ends_the_command_afterwards() -> None:
    def be_interrupted() -> None:
        with servers._interrupted_later() as is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            assert is_interrupted()
            done.append(1)

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert done


def test_sigterm_stops_as_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def be_terminated() -> None:
        with servers.terminable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        be_terminated()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_task_has_no_probes_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opener:
        open = staticmethod(lambda *_, **__: contextlib.nullcontext())

    monkeypatch.setattr(servers, "_OPENER", Opener)
    path = tmp_path / "probes.jsonl"
    path.write_text("{}\n")
    server = RunningServer("http://127.0.0.1:1", is_stock=False, probe_file=path)
    server.forget()
    assert not path.exists()
    server.forget()


def test_counters_of_several_cache_ranks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"values": {"fetched_rows_total": n, "busy_s": 1.0}} for n in (3.0, 4.0, 5.0)]
    status: dict[str, Any] = {
        "inference_rank": {"values": {"sparse_rows_total": 7.0}}, "cache_ranks": ranks
    }  # fmt: skip
    monkeypatch.setattr(servers, "fetch_status", lambda _: status)
    server = RunningServer("http://127.0.0.1:1", is_stock=False)
    want = {"inference.sparse_rows_total": 7.0, "cache.fetched_rows_total": 12.0}
    assert server.counters() == want
    status["cache_ranks"] = [ranks[0], {"error": "away"}]
    with pytest.raises(MeasurementError, match="cache rank reports no counters: away"):
        server.counters()
    status["cache_ranks"] = []
    assert server.counters()["cache.sparse_rows_total"] == 7.0


def test_a_server_is_ended_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process group must not be killed, nor its pipe closed, by two."""
    began, inside, overlaps = threading.Event(), threading.Lock(), []

    class Child:
        pid = 1 << 30  # nobody's

        def __init__(self, spec: ChildSpec) -> None:
            self.spec, self.status = spec, None

        def start(self) -> None:
            pass

        def exit_status(self) -> str | None:
            return self.status

        def await_ready(self, *_: Any, **__: Any) -> None:
            pass

        def stop(self, *_: Any, **__: Any) -> None:
            is_alone = inside.acquire(blocking=False)
            overlaps.append(not is_alone)
            began.set()
            time.sleep(0.3)
            if is_alone:
                inside.release()

    monkeypatch.setattr(servers, "ChildProcess", Child)
    stop, spec = threading.Event(), ChildSpec(name="x", argv=(), env={}, log_path=Path("x"))
    with servers._running(spec, SERVER, 1.0, stop, lambda _: None):
        stop.set()
        assert began.wait(5)
    assert overlaps == [False, False]
