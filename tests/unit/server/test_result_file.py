# SPDX-License-Identifier: Apache-2.0
"""Results that could not be written are refused before anything is measured."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation.result_file import check_result_file, check_result_folder


@pytest.mark.parametrize(
    "command",
    [
        "calibrate smollm2 --policy kascade --out",
        "inspect smollm2 --prompt-file {file} --out",
        "soak smollm2 --json",
        "bench decode --out",
        "bench serve --tokenizer smollm2 --out",
    ],
)
@pytest.mark.parametrize("place", ["{folder}", "{file}/result"])
def test_commands_look_before_they_work(command: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a prompt")
    asked = f"{command} {place}".format(file=file, folder=tmp_path)
    result = CliRunner().invoke(app, asked.split())
    assert result.exit_code == 2, result.output
    assert "folder" in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_result_file(tmp_path / "new" / "folder" / "result.json", "--out")
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(SettingsError, match=f"--out .*: {tmp_path} cannot be written to; name"):
        check_result_file(tmp_path / "new" / "result.json", "--out")
    (tmp_path / "old.json").write_text("{}")
    check_result_file(tmp_path / "old.json", "--out")


@pytest.mark.parametrize("place", ["{}/file", "{}/file/results", "~/file"])
def test_quality_looks_for_its_folder_before_it_works(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = ["quality", "smollm2", "--policies", "streaming", "--out", place.format(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2, result.output
    assert "is no folder; name a folder in another" in " ".join(result.output.split())


def test_a_folder_may_be_there_or_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_result_folder(tmp_path, "--out")
    check_result_folder(tmp_path / "new" / "results", "--out")
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(SettingsError, match=f"{tmp_path} cannot be written to; name another fol"):
        check_result_folder(tmp_path / "new", "--out")
