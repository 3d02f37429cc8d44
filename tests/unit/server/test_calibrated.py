# SPDX-License-Identifier: Apache-2.0
"""`tandemkv calibrate MODEL`: what it keeps, and what `serve` and `plan` take up of it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import Result
from tiny_calibrated import make_tiny_model
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.fitted_queries import FittedQueries
from tandemkv.cache_rank.protocol.models.index_channels import num_index_channels
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, read_model_spec
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.runtime import Runtime
from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation.calibrate.look_ahead import QueryMeasurement
from tandemkv.server.models.calibrated import (
    calibration_advice,
    calibration_folder,
    channels_file,
    kept_channels,
    queries_file,
    with_calibration,
)
from tandemkv.server.settings.launch_settings import ServeSettings


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=64)


@pytest.fixture(scope="module")
def cache(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with what `calibrate` keeps of the model."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        result = run("calibrate", str(tiny), "--texts", "8", "--tokens", "100", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.output.count("ok") >= 2
    return folder


@pytest.fixture
def spec(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return read_model_spec(tiny, dtype="float32")


def taken_up(
    spec: ModelSpec, index_dtype: str = "int4", **given: Any
) -> tuple[ServeSettings, list[str]]:
    selection = {"index_dtype": index_dtype, **given.get("selection", {})}
    given = {name: value for name, value in given.items() if name != "selection"}
    settings = ServeSettings.model_validate({"model": "m", "selection": selection, **given})
    said: list[str] = []
    return with_calibration(settings, spec, said.append), said


def test_serve_takes_up_what_was_kept(tiny: Path, spec: ModelSpec) -> None:
    settings, said = taken_up(spec)
    selection = settings.selection
    assert selection.declared.predictor == str(queries_file(spec, 1))
    assert selection.index_channels == str(channels_file(spec))
    assert num_index_channels(selection) == 32
    assert FittedQueries.of(selection, spec) is not None
    assert said == [
        "calibrated: fitted queries, 32 of 64 channels in the index; --no-calibrated serves without"
    ]
    assert with_calibration(settings, spec, said.append) is settings, "decided once"
    assert len(said) == 1
    assert not list(calibration_folder(spec).glob("part-*"))


def test_a_native_index_has_all_channels(spec: ModelSpec) -> None:
    settings, said = taken_up(spec, "native")
    assert settings.selection.index_channels is None
    assert settings.selection.declared.predictor
    assert said == ["calibrated: fitted queries; --no-calibrated serves without"]


def test_what_was_named_stays(spec: ModelSpec, tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes(channels_file(spec).read_bytes())
    settings, _ = taken_up(spec, selection={"index_channels": str(own)})
    assert settings.selection.index_channels == str(own)
    own.write_bytes(queries_file(spec, 1).read_bytes())
    settings, _ = taken_up(spec, selection={"options": {"predictor": str(own)}})
    assert settings.selection.declared.predictor == str(own)


@pytest.mark.parametrize(
    "given",
    [
        {"calibrated": False},
        {"selection": {"policy": "oracle"}},
        {"cache_rank_address": "tcp://127.0.0.1:7400", "link_keys": "keys"},
    ],
    ids=["told not to", "another policy", "a cache rank of another host"],
)
def test_others_get_nothing(spec: ModelSpec, given: dict[str, Any]) -> None:
    settings, said = taken_up(spec, **given)
    assert settings.selection.index_channels is None
    assert not settings.selection.declared.predictor
    assert said == []


def test_another_distance_has_files_of_its_own(spec: ModelSpec) -> None:
    settings, said = taken_up(spec, selection={"options": {"distance": 2}})
    assert not settings.selection.declared.predictor
    assert (settings.selection.index_channels, said) == (None, []), "channels go with it"


def test_other_weights_are_another_model(spec: ModelSpec) -> None:
    other = msgspec.structs.replace(spec, model_hash="f" * 32)
    settings, said = taken_up(other)
    assert (settings.selection.index_channels, said) == (None, [])
    assert "`tandemkv calibrate MODEL`" in (calibration_advice(settings, other) or "")


@pytest.mark.parametrize(
    "given",
    [
        {"calibrated": False},
        {"selection": {"policy": "oracle"}},
        {"selection": {"index_dtype": "native"}},
        {"cache_rank_address": "tcp://127.0.0.1:7400", "link_keys": "keys"},
    ],
    ids=["told not to", "another policy", "all channels", "a cache rank of another host"],
)
def test_no_advice_where_it_would_change_nothing(spec: ModelSpec, given: dict[str, Any]) -> None:
    other = msgspec.structs.replace(spec, model_hash="f" * 32)
    assert calibration_advice(taken_up(other)[0], other) is not None
    assert calibration_advice(taken_up(other, **given)[0], other) is None
    assert calibration_advice(taken_up(spec)[0], spec) is None, "it is calibrated"
    for cannot in ({"head_dim": 32}, {"linear_layers": (0,)}):
        model = msgspec.structs.replace(other, **cannot)
        assert calibration_advice(taken_up(other)[0], model) is None


def test_a_damaged_file_is_named(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [queries_file(spec, 1).read_bytes(), channels_file(spec).read_bytes()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = queries_file(spec, 1), channels_file(spec)
    paths[0].parent.mkdir(parents=True)
    for damaged in paths:
        for path, content in zip(paths, whole, strict=True):
            path.write_bytes(b"damaged" if path == damaged else content)
        said = rf"{damaged.name}: cannot be read .*: run that again, or add --no-calibrated"
        with pytest.raises(SettingsError, match=said):
            taken_up(spec)


@pytest.mark.parametrize(
    ("head_dim", "kept"), [(32, None), (64, 32), (80, 64), (96, 64), (128, 64), (256, 128)]
)
def test_half_of_the_channels_are_kept(head_dim: int, kept: int | None) -> None:
    assert kept_channels(head_dim) == kept


def test_plan_predicts_with_it(tiny: Path, spec: ModelSpec) -> None:
    sizes = ["plan", "--model", str(tiny), "--context", "256", "--gpu-memory", "139"]
    told = " ".join(run(*sizes).output.split())
    assert "int4 index of 32 of 64 channels" in told
    assert "calibrated: fitted queries" in told
    without = " ".join(run(*sizes, "--no-calibrated").output.split())
    assert "of 64 channels" not in without
    assert without.count("calibrat") == without.count("--no-calibrated") == 1, "in the command"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--out", "x.safetensors"], "out goes with --policy or --index-channels"),
        (["--policy", "look_ahead"], "give --out FILE"),
        (["--policy", "kascade", "--index-channels", "32", "--out", "x"], "a file is for one"),
    ],
)
def test_calibrate_says_what_goes_together(tiny: Path, options: list[str], advice: str) -> None:
    result = run("calibrate", str(tiny), *options)
    assert result.exit_code == 2
    assert advice in " ".join(result.output.split())


def test_a_failed_calibration_keeps_what_was_there(
    tiny: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandemkv.server.evaluation.calibrate import command

    def fail(*_: Any, **__: Any) -> Callable[..., None]:
        raise SettingsError("out=part: cannot be written (disk full)")

    before = queries_file(spec, 1).read_bytes()
    monkeypatch.setattr(command, "fit_queries", fail)
    assert run("calibrate", str(tiny), "--texts", "8", "--tokens", "100").exit_code == 2
    assert queries_file(spec, 1).read_bytes() == before
    assert not list(calibration_folder(spec).glob("part-*"))


def test_a_calibration_that_is_terminated_leaves_no_part(
    tiny: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandemkv.server.evaluation.calibrate import command

    def terminate(*_: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "fit_queries", terminate)
    result = run("calibrate", str(tiny), "--device", "cpu")
    assert not isinstance(result.exception, AssertionError)
    assert result.exit_code == 130
    assert not list(calibration_folder(spec).glob("part-*"))


def test_status_names_what_is_used(tiny: Path, spec: ModelSpec) -> None:
    for is_calibrated in (True, False):
        settings, _ = taken_up(spec, calibrated=is_calibrated)
        runtime = Runtime(
            settings=settings.rank_settings,
            model=spec,
            counters=Counters(),
            resident_bytes=0,
            occupancy=SimpleNamespace(values=dict),  # type: ignore[arg-type]
        )
        info = runtime.reply(epoch=1, ready=True, values={}, info={}).info
        assert ("predictor" in info) == ("index_channels" in info) == is_calibrated
        if is_calibrated:
            assert (info["predictor"], info["index_channels"]) == (
                "queries-1.safetensors", "32 of 64",
            )  # fmt: skip


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_model_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "touch", refuse)  # whoever runs the tests may write anywhere
    monkeypatch.setattr(QueryMeasurement, "__init__", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run("calibrate", str(tiny), "--device", "cpu")
    assert result.exit_code == 2
    folder = tmp_path / "tandemkv" / "calibrated"
    assert f"{folder}/" in result.output
    assert "cannot be written to (Permission denied); set XDG_CACHE_HOME to" in result.output
