# SPDX-License-Identifier: Apache-2.0
"""The cache rank as a process: signals, threads, refusals before anything is promised."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tiny_model import write_model

from tandemkv.cache_rank import process
from tandemkv.cache_rank.policies.base import PolicyError
from tandemkv.cache_rank.process import run_cache_rank
from tandemkv.cache_rank.protocol.control import ControlServer
from tandemkv.cache_rank.protocol.errors import (
    CacheRankError,
    SettingsError,
    UnsupportedModelError,
)
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.ipc import server_pid, take_lock
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)
from tandemkv.cache_rank.service.service import SharedEngineService


def settings_of(policy="look_ahead"):
    return RankSettings(selection=SelectionSettings(policy=policy))


def two_ranks():
    """Settings of one cache rank for two tensor-parallel ranks."""
    placement = Placement(link="shared", tp_size=2, engines_per_rank=2)
    return RankSettings(selection=SelectionSettings(policy="look_ahead"), placement=placement)


@pytest.fixture
def arguments(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    return {
        "run_dirs": [run_dir.path],
        "model_dir": write_model(tmp_path / "model"),
        "settings": settings_of(),
        "max_rows": 4,
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(arguments, number):
    run_dir = RunDir.open(arguments["run_dirs"][0])
    before = signal.getsignal(number)
    replies = []

    def on_ready():
        replies.append(request_status(run_dir.heartbeat_socket, 5.0))
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    run_cache_rank(**arguments, on_ready=on_ready)
    assert replies[0].role == "cache_rank"
    assert replies[0].ready
    assert signal.getsignal(number) is before
    assert not run_dir.control_socket.exists()


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_it_serves_several_inference_ranks_and_all_end_together(arguments, monkeypatch, failing):
    """By a signal, or because the engine of one has failed: the process is started again then."""
    first = RunDir.open(arguments["run_dirs"][0])
    run_dirs = [first, first.of_rank(1, create=True)]
    run_some, threads, heads = SharedEngineService.run_some, set(), {}
    replies = []

    def run_or_fail(service):
        threads.add(threading.get_ident())
        heads[service._run_dir.path] = service._shard.heads(service._model.num_kv_heads)
        if replies and failing is not None and service._run_dir.path == run_dirs[failing].path:
            raise OSError("no more descriptors")
        run_some(service)

    monkeypatch.setattr(SharedEngineService, "run_some", run_or_fail)

    def on_ready():
        replies.extend(request_status(each.heartbeat_socket, 5.0) for each in run_dirs)
        assert {server_pid(each.control_socket) for each in run_dirs} == {os.getpid()}
        if failing is None:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

    given = arguments | {"run_dirs": [each.path for each in run_dirs], "settings": two_ranks()}
    if failing is None:
        run_cache_rank(**given, on_ready=on_ready)
    else:
        with pytest.raises(OSError, match="no more descriptors"):
            run_cache_rank(**given, on_ready=on_ready)
    assert [reply.ready for reply in replies] == [True, True]
    assert {reply.info["cache_ranks"] for reply in replies} == {"1"}
    assert len(threads) == 2
    assert [heads[each.path] for each in run_dirs] == [range(1), range(1, 2)]
    assert not any(each.control_socket.exists() for each in run_dirs)


def test_refusals(arguments, monkeypatch, tmp_path):
    with pytest.raises(SettingsError, match="run-dir"):
        run_cache_rank(**arguments | {"run_dirs": [tmp_path / "nowhere"]})
    with pytest.raises(UnsupportedModelError):
        run_cache_rank(**arguments | {"model_dir": tmp_path})
    with pytest.raises(PolicyError, match="unknown"):
        run_cache_rank(**arguments | {"settings": settings_of(policy="guess")})
    with pytest.raises(SettingsError, match="rank=1: there are cache ranks 0 to 0"):
        run_cache_rank(**arguments, rank=1)
    with pytest.raises(SettingsError, match="1 directories, and each cache rank serves 2"):
        run_cache_rank(**arguments | {"settings": two_ranks()})
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(SettingsError, match="many"):
        run_cache_rank(**arguments)


@pytest.mark.parametrize(
    ("text", "is_beside_gpu", "want"),
    [(None, True, [1]), (None, False, []), ("3", True, [1]), ("4,2", False, [4])],
)
def test_torch_has_one_thread_beside_a_gpu(
    text: str | None, is_beside_gpu: bool, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    process._set_threads(is_beside_gpu=is_beside_gpu)
    assert seen == want


def test_importing_the_process_touches_neither_transformers_nor_sglang():
    code = (
        "import sys, tandemkv.cache_rank.process\n"
        "bad = {'transformers', 'sglang', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("numbers", "epoch", "ends"),
    [
        ([signal.SIGTERM], 0, True),  # nobody to wait for
        ([signal.SIGTERM], 7, False),
        ([signal.SIGTERM, signal.SIGTERM], 7, True),
        ([signal.SIGINT], 7, True),
    ],
)
def test_sigterm_waits_for_the_inference_rank(
    numbers: list[signal.Signals], epoch: int, ends: bool
) -> None:
    stop = threading.Event()
    epochs = [epoch]
    with process._stopping_on_signals(stop, lambda: epochs[0], 30.0):
        for number in numbers:
            signal.raise_signal(number)
        assert stop.wait(0.3) is ends
        epochs[0] = 0  # it went
        assert stop.wait(5.0)


def test_sigterm_waits_no_longer_than_it_may() -> None:
    stop = threading.Event()
    with process._stopping_on_signals(stop, lambda: 7, 0.2):
        signal.raise_signal(signal.SIGTERM)
        assert not stop.is_set()
        assert stop.wait(5.0)


def test_a_standby_takes_its_turn_when_the_other_ends(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    assert server_pid(run_dir.control_socket) is None
    serving = ControlServer(run_dir)
    assert server_pid(run_dir.control_socket) == os.getpid()
    turn = threading.Thread(target=process.await_turn, args=(run_dir,), daemon=True)
    turn.start()
    turn.join(0.2)
    assert turn.is_alive()
    serving.close()
    turn.join(5.0)
    assert not turn.is_alive()
    assert server_pid(run_dir.control_socket) is None


def test_of_two_standbys_one_waits_again(arguments, monkeypatch):
    """Both have seen that the place is free; it is that of several inference ranks."""
    first = RunDir.open(arguments["run_dirs"][0])
    second, wait, winners, seen = first.of_rank(1, create=True), process.await_turn, [], []

    def wait_and_lose(run_dir):
        wait(run_dir)
        if run_dir.path == second.path and not winners:
            winners.append(ControlServer(second))
        elif len(seen) == 0 and winners:
            seen.append(server_pid(first.control_socket))
            winners[0].close()

    def stop():
        assert {server_pid(each.control_socket) for each in (first, second)} == {os.getpid()}
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(process, "await_turn", wait_and_lose)
    given = arguments | {"run_dirs": [first.path, second.path], "settings": two_ranks()}
    run_cache_rank(**given, standby=True, on_ready=stop)
    assert seen == [None]  # what it had got by then was free again


def test_who_looks_for_a_server_is_not_taken_for_one(tmp_path):
    """A standby that looks would keep another process from its start, or take a looker for it."""
    path, stop, seen = tmp_path / "x.sock", threading.Event(), []
    os.close(take_lock(path))  # there is a file to look at

    def look():
        while not stop.is_set():
            seen.append(server_pid(path))
            time.sleep(0.001)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    try:
        for looker in lookers:
            looker.start()
        time.sleep(0.1)
        assert set(seen) == {None}
        for _ in range(200):
            os.close(take_lock(path))
    finally:
        stop.set()
        for looker in lookers:
            looker.join()
    assert set(seen) <= {None, 0, os.getpid()}  # 0: a lock without a number yet
    handle = take_lock(path)
    with pytest.raises(CacheRankError, match="another live process serves it"):
        take_lock(path)
    os.close(handle)


def test_a_thread_that_cannot_be_started_ends_the_others(monkeypatch):
    """A container may have no more of them; an engine that runs would be waited for for good."""
    submit, ended = ThreadPoolExecutor.submit, []

    def submit_once(pool, *given):
        if ended:
            raise RuntimeError("can't start new thread")
        ended.append(False)
        return submit(pool, *given)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_once)
    stop = threading.Event()
    service = SimpleNamespace(run=lambda stop, *_: ended.append(stop.wait(30)))

    def run():
        with pytest.raises(RuntimeError, match="new thread"):
            process._run_all([service] * 3, stop, None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    is_running = thread.is_alive()
    stop.set()
    thread.join()
    assert not is_running
    assert ended == [False, True]
