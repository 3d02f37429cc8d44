# SPDX-License-Identifier: Apache-2.0
"""The run directory lets nobody in but its owner."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_create_and_open(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path / "a" / "run")
    assert _mode(created.path) == 0o700
    assert _mode(created.path / "token") == 0o600
    assert len(created.token) == 32
    opened = RunDir.open(created.path)
    assert opened.token == created.token
    assert opened.control_socket != opened.heartbeat_socket != opened.inference_socket
    assert [p.name for p in created.path.iterdir()] == ["token"]


def test_create_again_keeps_the_token(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "run")
    assert RunDir.create(tmp_path / "run").token == first.token


def test_two_directories_have_different_tokens(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path / "a").token != RunDir.create(tmp_path / "b").token


def test_default_is_under_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:  # pytest's may be too long a path
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        run_dir = RunDir.create()
        assert run_dir.path.parent == Path(runtime)
        check_made_and_removed(run_dir, monkeypatch)


def check_made_and_removed(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _mode(run_dir.path) == 0o700
    run_dir.remove()
    assert not run_dir.path.exists()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    fallback = RunDir.create()
    assert fallback.path.parent == Path("/tmp")
    fallback.remove()


def test_no_advice_to_close_a_directory_that_others_need(tmp_path: Path) -> None:
    """``chmod 0700 /tmp``, or of a home, would lock everybody out."""
    with pytest.raises(SettingsError, match=r"users share.*--run-dir /tmp/tandemkv") as caught:
        RunDir.create("/tmp")
    assert "chmod" not in str(caught.value)
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    RunDir.create(tmp_path / "run").path.chmod(0o755)
    with pytest.raises(SettingsError, match="chmod 0700 it"):  # a run directory already
        RunDir.create(tmp_path / "run")
    (home / "letters").touch()
    with pytest.raises(SettingsError, match=f"--run-dir {home}/tandemkv") as caught:
        RunDir.create(home)
    assert "chmod" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o750])
def test_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    RunDir.create(tmp_path / "run")
    (tmp_path / "run").chmod(mode)
    for use in (RunDir.create, RunDir.open):
        with pytest.raises(SettingsError, match="lets others in"):
            use(tmp_path / "run")


def test_token_open_to_others_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    (run_dir.path / "token").chmod(0o644)
    for use in (RunDir.create, RunDir.open):
        with pytest.raises(SettingsError, match=r"token.*0644"):
            use(run_dir.path)


def test_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDir.create(tmp_path / "run")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    for use in (RunDir.create, RunDir.open):
        with pytest.raises(SettingsError, match="belongs to uid"):
            use(tmp_path / "run")


def test_link_and_file_are_refused(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "file"):
        for use in (RunDir.create, RunDir.open):
            with pytest.raises(SettingsError, match="must be a directory"):
                use(tmp_path / name)


def test_missing_directory_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="tandemkv cache-rank"):
        RunDir.open(tmp_path / "nowhere")


def test_long_path_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)
    with pytest.raises(SettingsError, match="shorter --run-dir"):
        RunDir.create(path)
    assert not path.exists()


def test_a_long_runtime_directory_is_refused_and_nothing_left_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("x" * 80)
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    with pytest.raises(SettingsError, match=r"^XDG_RUNTIME_DIR=.*bytes.*or give --run-dir"):
        RunDir.create()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("token", [b"", b"short", b"x" * 33])
def test_token_of_wrong_length_is_refused(tmp_path: Path, token: bytes) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    (run_dir.path / "token").write_bytes(token)
    with pytest.raises(SettingsError, match="must be 32"):
        RunDir.open(run_dir.path)


def test_repr_does_not_show_the_token(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    assert run_dir.token.hex() not in repr(run_dir)


def test_epochs_are_never_reused(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "run")
    numbers = [first.next_epoch(), first.next_epoch()]
    numbers.append(RunDir.open(first.path).next_epoch())
    assert numbers == [1, 2, 3]


def test_each_tensor_parallel_rank_has_a_directory_of_its_own(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    assert run_dir.of_rank(0, create=True) is run_dir
    made = run_dir.of_rank(1, create=True)
    assert made.path == run_dir.path / "tp1"
    assert _mode(made.path) == 0o700
    assert made.token != run_dir.token
    assert run_dir.of_rank(1).token == made.token
    assert (run_dir.next_epoch(), made.next_epoch(), made.next_epoch()) == (1, 1, 2)
    with pytest.raises(SettingsError, match="tp2/token"):
        _ = run_dir.of_rank(2).token
    run_dir.of_rank(12, create=True)
    for name in ("tpx", "tp0", "tp123"):
        (run_dir.path / name).mkdir()
    run_dir.clear()
    assert {path.name for path in run_dir.path.iterdir()} == {"tpx", "tp0", "tp123"}
