# SPDX-License-Identifier: Apache-2.0
"""A launch removes what it made in a run directory, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import (
    CacheRankError,
    CacheRankLostError,
    SettingsError,
)
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.ipc import take_lock
from tandemkv.cache_rank.protocol.message.keys import make_keys
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.server.checks.preflight import ResolvedLaunch
from tandemkv.server.launch.cache_rank_launch import (
    SETTINGS_FILE,
    cache_rank_pulse,
    clean_run_dir,
)
from tandemkv.server.launch.launcher import Launcher
from tandemkv.server.launch.liveness import Pulse
from tandemkv.server.launch.run_dir_lock import lock_run_dir
from tandemkv.server.launch.serve import (
    COMPILED_VARIABLE,
    METRICS_VARIABLE,
    make_plan,
    prepare_run_dir,
    sglang_folders,
)
from tandemkv.server.launch.watchdog import Watchdog
from tandemkv.server.settings.launch_settings import ServeSettings


@pytest.fixture
def launch(tmp_path: Path) -> ResolvedLaunch:
    folder: Any = tmp_path / "run"
    spec: Any = type("Spec", (), {"dtype": "float32"})()
    settings = ServeSettings(model="smollm2", cache_ranks=1, run_dir=folder)
    return ResolvedLaunch(settings=settings, model_dir=tmp_path, spec=spec, device="cpu", port=1)


def names(run_dir: RunDir) -> set[str]:
    return {path.name for path in run_dir.path.iterdir()}


def test_files_of_the_user_survive(launch: ResolvedLaunch) -> None:
    theirs = {"settings.yaml", "notes.log", "other.sock", "store-keeper.txt"}
    run_dir = RunDir.create(launch.settings.run_dir)
    for name in theirs:
        (run_dir.path / name).write_text("mine")
    prepare_run_dir(launch)
    make_plan(launch, run_dir)
    clean_run_dir(run_dir, is_ours=False, keep_logs=False)
    assert names(run_dir) == theirs
    assert all((run_dir.path / name).read_text() == "mine" for name in theirs)


def test_nothing_is_left_where_no_watchdog_can_be_started(
    launch: ResolvedLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr("tandemkv.server.launch.launcher.Watchdog", refuse)
    run_dir = prepare_run_dir(launch)
    plan = make_plan(launch, run_dir)
    with pytest.raises(BlockingIOError):
        Launcher(plan, Console())
    assert names(run_dir) == set()


def test_logs_of_an_earlier_launch_are_gone(launch: ResolvedLaunch) -> None:
    """They would stand before what the new processes say."""
    run_dir = RunDir.create(launch.settings.run_dir)
    logs = ("sglang", "cache_rank", "cache_rank1", "standby", "pump", "pump12")
    for name in (*(f"{log}.log" for log in logs), "pump.log.1"):
        (run_dir.path / name).write_text("before")
    prepare_run_dir(launch)
    assert names(run_dir) == {"token"}


def test_what_a_killed_server_left_is_gone(
    launch: ResolvedLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process ids come again in containers: ranks would meet over addresses of the dead."""
    monkeypatch.delenv(METRICS_VARIABLE, raising=False)
    run_dir = RunDir.create(launch.settings.run_dir)
    (run_dir.path / "sglang-store-40").write_text("dead")
    sglang_folders(run_dir)
    (run_dir.metrics / "counter_40.db").write_text("dead")
    (run_dir.temporary / "tmpsocket").write_text("dead")
    prepare_run_dir(launch)
    assert names(run_dir) == {"token"}
    plan = make_plan(launch, run_dir)
    folder = Path(plan.sglang.env[METRICS_VARIABLE])
    assert folder.parent == run_dir.path
    assert list(folder.iterdir()) == []
    assert Path(plan.sglang.env["TMPDIR"]) == run_dir.temporary
    assert list(run_dir.temporary.iterdir()) == []
    (run_dir.path / "sglang-store-41").write_text("")
    clean_run_dir(run_dir, is_ours=False, keep_logs=False)
    assert names(run_dir) == set()


def test_metrics_stay_where_the_user_wants_them(
    launch: ResolvedLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METRICS_VARIABLE, "/elsewhere")
    run_dir = prepare_run_dir(launch)
    assert make_plan(launch, run_dir).sglang.env[METRICS_VARIABLE] == "/elsewhere"


def test_what_torch_compiles_is_kept_only_where_it_can_be(
    launch: ResolvedLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no home that can be written: torch ends SGLang at such a folder."""
    monkeypatch.delenv(COMPILED_VARIABLE, raising=False)
    run_dir = prepare_run_dir(launch)
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert sglang_folders(run_dir)[COMPILED_VARIABLE] == str(cache / "tandemkv" / "inductor")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert COMPILED_VARIABLE not in sglang_folders(run_dir)


def test_the_cache_rank_is_not_told_what_is_for_sglang(launch: ResolvedLaunch) -> None:
    """An API key has no business in its settings file."""
    settings = launch.settings.model_copy(update={"sglang_args": ("--log-level", "secret")})
    run_dir = prepare_run_dir(launch)
    plan = make_plan(replace(launch, settings=settings), run_dir)
    assert "secret" in plan.sglang.argv
    assert "secret" not in (run_dir.path / SETTINGS_FILE).read_text()


def test_a_launch_that_is_loading_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank of it answers yet, and its port is free."""
    monkeypatch.setattr("tandemkv.server.launch.run_dir_lock._LOCK_WAIT_S", 0.3)
    folder = tmp_path / "run"
    with lock_run_dir(folder):
        with pytest.raises(SettingsError, match="another launch is there"), lock_run_dir(folder):
            pass
        assert names(RunDir(folder)) == {"token", "launcher.lock"}
        RunDir(folder).clear()  # as at its end
    with lock_run_dir(folder):
        assert "launcher.lock" in names(RunDir(folder))
    with lock_run_dir(None) as lock:
        assert lock is None


def test_a_lock_that_its_launch_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for it has the file of before, and whoever comes next would make another."""
    folder, taken = tmp_path / "run", []

    def take(path: Path) -> int:
        handle = take_lock(path)
        taken.append(handle)
        if len(taken) == 1:
            Path(f"{path}.lock").unlink()
        return handle

    monkeypatch.setattr("tandemkv.server.launch.run_dir_lock.take_lock", take)
    with lock_run_dir(folder) as lock:
        assert len(taken) == 2
        assert os.path.samestat(os.fstat(lock or 0), (folder / "launcher.lock").stat())


def test_the_watchdog_keeps_the_lock_until_it_has_removed_what_is_there(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "launcher")
    watchdog = Watchdog(lock=lock)
    os.close(lock)  # as if the launcher was killed
    with pytest.raises(CacheRankError):
        take_lock(tmp_path / "launcher")
    watchdog.close()
    os.close(take_lock(tmp_path / "launcher"))


def test_the_lock_goes_when_all_else_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another launch may wait for it, whose files would go with those of the one that ends."""
    run_dir, seen = RunDir.create(tmp_path / "run"), list[bool]()
    lock = run_dir.path / "launcher.lock"
    os.close(take_lock(lock.with_suffix("")))
    run_dir.temporary.mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: seen.append(lock.exists()))
    run_dir.clear()
    assert seen == [True]
    assert not lock.exists()
    assert run_dir.made[-1] == str(lock)  # in this order the watchdog removes them


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_live_inference_rank_keeps_its_directory(launch: ResolvedLaunch, is_busy: bool) -> None:
    """In process there is no cache rank that would answer."""
    run_dir = RunDir.create(launch.settings.run_dir)
    reply = StatusReply(role="inference_rank", epoch=1, ready=True, values={}, info={})
    go_on = threading.Event()

    def status() -> StatusReply:
        assert not is_busy or go_on.wait(60)
        return reply

    server = StatusServer(run_dir.inference_socket, status=status)
    try:
        with pytest.raises(SettingsError, match="another server is running there"):
            prepare_run_dir(launch)
        assert run_dir.inference_socket.exists()
    finally:
        go_on.set()
        server.close()


def test_the_pulse_of_a_cache_rank_is_how_long_its_work_stands_still(
    launch: ResolvedLaunch,
) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    with pytest.raises(CacheRankLostError):
        cache_rank_pulse([run_dir], os.getpid())
    values = {"busy_s": 600.0, "stalled_s": 0.5}  # busy for long, and it moves
    server = StatusServer(
        run_dir.heartbeat_socket,
        status=lambda: StatusReply(
            role="cache_rank", epoch=1, ready=True, values=dict(values), info={}
        ),
    )
    try:
        assert cache_rank_pulse([run_dir], os.getpid()) == Pulse(is_ready=True, stalled_s=0.5)
    finally:
        server.close()


def test_a_folder_of_the_user_is_not_taken_for_ours(launch: ResolvedLaunch) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    for name in ("tmp", "metrics", "store-7-notes"):
        (run_dir.path / name).mkdir()
    clean_run_dir(run_dir, is_ours=False, keep_logs=False)
    assert names(run_dir) == {"tmp", "metrics", "store-7-notes"}


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_no_launch_made_survives_under_names_of_a_launch(
    tmp_path: Path, *, is_killed: bool
) -> None:
    run_dir, elsewhere = RunDir.create(tmp_path / "run"), tmp_path / "elsewhere"
    theirs = {"far", "tp2/epoch", "tp3/token", "tp4", "tp5", "own-keys/notes", "tp1/notes"}
    for folder in ("tp2", "tp3", "own-keys"):
        (run_dir.path / folder).mkdir()
    elsewhere.mkdir()
    (run_dir.path / "tp5").symlink_to(elsewhere)
    run_dir.of_rank(1, create=True).next_epoch()
    make_keys(run_dir.path / "own-keys")
    for name in theirs - {"tp5"}:
        (run_dir.path / name).write_text("mine")
    if is_killed:
        watchdog = Watchdog(run_dir.made)
        watchdog._popen.communicate(timeout=60)  # the end of its pipe, without ``bye``
    else:
        run_dir.clear()
    paths = {path.relative_to(run_dir.path) for path in run_dir.path.rglob("*")}
    assert {str(path) for path in paths} - {"tp1", "tp2", "tp3", "own-keys"} == theirs
    assert elsewhere.is_dir()


def test_a_standby_is_a_second_cache_rank_that_is_asked_for_nothing(
    launch: ResolvedLaunch,
) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    assert make_plan(launch, run_dir).cache_ranks[0].standby is None
    settings = launch.settings.model_copy(update={"standby": True})
    (rank,) = make_plan(replace(launch, settings=settings), run_dir).cache_ranks
    assert rank.spec is not None
    assert rank.standby is not None
    assert rank.standby.argv == rank.spec.argv
    assert rank.standby.log_path != rank.spec.log_path
    assert "standby: true" in (run_dir.path / SETTINGS_FILE).read_text()
    server = StatusServer(
        run_dir.heartbeat_socket,
        status=lambda: StatusReply(
            role="cache_rank", epoch=1, ready=True, values={"stalled_s": 9.0}, info={}
        ),
    )
    try:
        assert rank.pulse(os.getpid()).stalled_s == 9.0
        assert rank.pulse(1) == Pulse(is_ready=True, stalled_s=0.0, waits=True)
    finally:
        server.close()


def test_a_launch_holds_memory_for_its_ranks(launch: ResolvedLaunch) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    with make_plan(launch, run_dir).holder():
        assert run_dir.holder_socket.exists()
    assert not run_dir.holder_socket.exists()


def split_over_two(launch: ResolvedLaunch, engines_per_rank: int = 1) -> ResolvedLaunch:
    placement = Placement(link="shared", tp_size=2, engines_per_rank=engines_per_rank)
    changes = {
        "tensor_parallel": 2, "cache_ranks": placement.num_cache_ranks, "placement": placement,
        "standby": True,
    }  # fmt: skip
    return replace(launch, settings=launch.settings.model_copy(update=changes))


def test_each_tensor_parallel_rank_has_a_cache_rank_directory_and_holder(
    launch: ResolvedLaunch,
) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    plan = make_plan(split_over_two(launch), run_dir)
    own = [run_dir.of_rank(rank) for rank in (0, 1)]
    specs = []
    for number, rank in enumerate(plan.cache_ranks):
        assert rank.spec is not None
        assert rank.standby is not None
        assert "--run-dir" in rank.spec.argv
        assert rank.spec.argv[rank.spec.argv.index("--run-dir") + 1] == str(own[number].path)
        assert rank.spec.argv[-1] == str(run_dir.path / SETTINGS_FILE)
        assert ("--rank" in rank.spec.argv) is bool(number)
        assert rank.spec.name == f"cache rank {number}"
        specs += [rank.spec, rank.standby]
    logs = [spec.log_path.name for spec in specs]
    assert logs == ["cache_rank.log", "standby.log", "cache_rank1.log", "standby1.log"]
    assert {spec.log_path.parent for spec in specs} == {run_dir.path}
    with plan.holder():
        assert all(each.holder_socket.exists() for each in own)
    assert not any(each.holder_socket.exists() for each in own)
    for spec in specs:
        spec.log_path.write_text("x")
    (run_dir.path / "tp-notes").mkdir()
    clean_run_dir(run_dir, is_ours=False, keep_logs=True)
    assert names(run_dir) == {*logs, "tp-notes"}
    prepare_run_dir(split_over_two(launch))
    assert names(run_dir) == {"tp-notes", "token"}


def test_each_cache_rank_is_asked_at_its_own_directory(launch: ResolvedLaunch) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    first, second = make_plan(split_over_two(launch), run_dir).cache_ranks
    reply = StatusReply(role="cache_rank", epoch=1, ready=True, values={"stalled_s": 3.0}, info={})
    server = StatusServer(run_dir.of_rank(1).heartbeat_socket, status=lambda: reply)
    try:
        assert first.detail() is not None
        assert second.detail() is None
        assert second.pulse(os.getpid()).stalled_s == 3.0
        with pytest.raises(CacheRankLostError):
            first.pulse(os.getpid())
    finally:
        server.close()


def test_one_cache_rank_of_both_ranks_is_asked_at_both_directories(launch: ResolvedLaunch) -> None:
    run_dir = RunDir.create(launch.settings.run_dir)
    plan = make_plan(split_over_two(launch, engines_per_rank=2), run_dir)
    (rank,) = plan.cache_ranks
    own = [run_dir.of_rank(number) for number in (0, 1)]
    assert rank.spec is not None
    folders = [word for path in own for word in ("--run-dir", str(path.path))]
    assert rank.spec.argv[5:-2] == tuple(folders)
    assert (rank.spec.name, rank.spec.log_path.name) == ("cache rank", "cache_rank.log")
    with plan.holder():
        assert all(each.holder_socket.exists() for each in own)
    with contextlib.ExitStack() as serving:
        for number, each in enumerate(own):
            assert rank.detail() is not None
            values = {"stalled_s": 3.0 * number}
            reply = StatusReply(role="cache_rank", epoch=1, ready=True, values=values, info={})
            serving.callback(StatusServer(each.heartbeat_socket, status=lambda r=reply: r).close)
        assert rank.detail() is None
        assert rank.pulse(os.getpid()).stalled_s == 3.0
