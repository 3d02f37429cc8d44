# SPDX-License-Identifier: Apache-2.0
"""Configurations, children, rows and ratios of `bench decode`, with a stand-in for the driver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.models.index_channels import (
    check_index_channels,
    num_index_channels,
)
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.server.evaluation.bench import decode, decode_steps
from tandemkv.server.evaluation.bench.configurations import (
    BUILT_IN,
    Configuration,
    load_configurations,
    pick,
)
from tandemkv.server.evaluation.bench.decode import (
    DecodeRun,
    check_sglang,
    run_decode,
    with_channels,
    write_model_config,
)
from tandemkv.server.evaluation.bench.decode_steps import Measured, Point, decode_steps_argv
from tandemkv.server.evaluation.bench.report import Spread
from tandemkv.server.launch.sglang_command import sglang_argv
from tandemkv.server.plan.shape import BUILT_IN_CONFIGS
from tandemkv.server.settings.launch_settings import ServeSettings

# Writes what the driver writes; a configuration says by its environment how it ends.
FAKE_DRIVER = """
import json, os, sys, time
value = lambda flag: sys.argv[sys.argv.index(flag) + 1]
step_ms = 1e3 * float(os.environ["FAKE_STEP_S"])
spread = {"median": 2 * step_ms, "p10": 1.2 * step_ms, "p90": 2.8 * step_ms, "n": 3}
if "TANDEMKV_RUN_DIR" in os.environ:
    assert os.path.isfile(os.environ["TANDEMKV_RUN_DIR"] + "/token")
    print(os.environ["TANDEMKV_RUN_DIR"], file=sys.stderr)
found = []
for point in value("--points").split(","):
    batch, context = map(int, point.split("x"))
    if context >= int(os.environ.get("FAKE_OOM_AT", 1 << 30)):
        raise RuntimeError("CUDA out of memory in /secret/place/x.py")
    if context >= int(os.environ.get("FAKE_HANG_AT", 1 << 30)):
        time.sleep(600)
    is_skipped = context >= int(os.environ.get("FAKE_SKIP_AT", 1 << 30))
    outcome = {"error": "max batch size limit"} if is_skipped else {
        "waited_ms": spread, "queued_ms": spread
    }
    found.append({"batch": batch, "context": context, **outcome})
    open(value("--out"), "w").write(json.dumps(found))
"""


def fake(step_s: float, *, is_reference: bool = False, **env: str) -> Configuration:
    return Configuration(is_reference=is_reference, env={"FAKE_STEP_S": str(step_s), **env})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DecodeRun:
    script = tmp_path / "driver.py"
    script.write_text(FAKE_DRIVER)

    def argv(**given: Any) -> tuple[str, ...]:
        python, _, _, _, *rest = decode_steps_argv(**given)
        return python, str(script), *rest

    monkeypatch.setattr(decode_steps, "decode_steps_argv", argv)
    write_model_config(BUILT_IN_CONFIGS["qwen3-8b"], tmp_path / "model", max_context=65536 + 20)
    return DecodeRun(
        model_dir=tmp_path / "model",
        tokenizer_dir=tmp_path,
        points=(Point(8, 65536), Point(1, 8192), Point(8, 8192)),
        configurations={
            "dense-tp2": fake(0.002, is_reference=True),
            "dense-tp1": fake(0.004, is_reference=True),
            "ours": fake(0.001),
        },
        work_dir=tmp_path,
        output_tokens=4,
        timeout_s=60,
    )


def replace_run(run: DecodeRun, **changes: object) -> DecodeRun:
    fields = {name: getattr(run, name) for name in DecodeRun.__dataclass_fields__}
    return DecodeRun(**{**fields, **changes})


def test_rows_and_ratios(run: DecodeRun) -> None:
    told: list[str] = []
    kept: list[int] = []
    result = run_decode(run, told.append, keep=lambda found: kept.append(len(found.rows)))
    rows = {row.figure: row for row in result.rows}
    assert result.failures == ()
    tpot = rows["tpot_ms_dense-tp2_8x64k"]
    assert (tpot.value, tpot.unit, tpot.n) == (pytest.approx(4.0), "ms", 3)
    assert tpot.p10 == pytest.approx(2.4)  # of 2, 4, 6
    assert tpot.p90 == pytest.approx(5.6)
    assert rows["tpot_ratio_vs_tp2_8x64k"].value == pytest.approx(0.5)
    assert rows["tpot_ratio_vs_tp1_8x64k"].value == pytest.approx(0.25)
    assert rows["tpot_ratio_ours_vs_dense-tp1_1x8k"].value == pytest.approx(0.25)
    assert len(rows) == 3 * 3 * 2 + 3 * 2 * 2 * 2
    assert kept == [6, 12, len(rows)]  # what an interrupted run would have
    # One child per batch size; what it measured is said when it ends.
    assert told[:2] == ["dense-tp2: 1x8k", "  1x8k: 4.00 ms a step"]
    assert told[2] == "dense-tp2: 8x8k, 8x64k"
    assert told[4] == "  8x64k: 4.00 ms a step"


def test_missing_points_are_failures_with_the_reason(run: DecodeRun) -> None:
    configurations = {
        "dense-tp1": fake(0.004, is_reference=True, FAKE_OOM_AT="65536"),
        "dense-tp2": fake(0.004, is_reference=True, FAKE_SKIP_AT="65536"),
        "ours": fake(0.001),
    }
    told: list[str] = []
    result = run_decode(replace_run(run, configurations=configurations), told.append)
    reasons = {failure.figure: failure.reason for failure in result.failures}
    assert "  tpot_ms_dense-tp2_8x64k: max batch size limit" in told
    assert reasons["tpot_ms_dense-tp2_8x64k"] == "max batch size limit"
    assert "exit code 1" in reasons["tpot_ms_dense-tp1_8x64k"]
    assert "CUDA out of memory" in reasons["tpot_ms_dense-tp1_8x64k"]
    assert "/secret" not in reasons["tpot_ms_dense-tp1_8x64k"]
    figures = {row.figure for row in result.rows}
    assert "tpot_ms_dense-tp1_8x8k" in figures  # written before the failure
    assert "tpot_ratio_vs_tp1_8x8k" in figures
    assert "tpot_ratio_vs_tp1_8x64k" not in figures


def test_a_child_that_hangs_is_ended(run: DecodeRun) -> None:
    hanging = replace_run(
        run,
        configurations={"ours": fake(0.001, FAKE_HANG_AT="65536")},
        points=(Point(8, 65536),),
        timeout_s=1.5,
    )
    began = time.monotonic()
    result = run_decode(hanging, lambda _: None)
    assert "no result within 1.5 s" in result.failures[0].reason
    assert result.rows == ()
    assert time.monotonic() - began < 30  # not the 600 s that the child wants


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_the_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    """Also those that the child itself started, as SGLang's ranks are."""
    child = "import os, subprocess, sys; p = subprocess.Popen(['sleep', '600']); "
    child += f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{p.pid}} '); p.wait()"
    code = (
        "import sys; from pathlib import Path; "
        "from tandemkv.server.evaluation.bench.decode import run_child; "
        f"run_child([sys.executable, '-c', {child!r}], Path({str(tmp_path)!r}), 600)"
    )
    bench = subprocess.Popen([sys.executable, "-P", "-c", code])
    pids: list[int] = []
    wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text()[-1:] == " ")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    bench.send_signal(number)
    bench.wait(timeout=30)
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_wrong_headline_is_refused_before_anything_runs(run: DecodeRun) -> None:
    with pytest.raises(SettingsError, match="there is ours"):
        run_decode(run, lambda _: pytest.fail("a child was started"), headline="dense-tp2")


def test_headline_chooses_whose_ratios_are_short() -> None:
    point = Point(8, 65536)
    measured = {
        (name, point): Measured(point=point, waited=spread, queued=spread)
        for name, spread in (
            ("dense-tp2", Spread.of([4.0])),
            ("a", Spread.of([2.0])),
            ("b", Spread.of([1.0])),
        )
    }
    table = {"dense-tp2": fake(1, is_reference=True), "a": fake(1), "b": fake(1)}
    for headline, expected in ((None, 0.5), ("b", 0.25)):
        rows = decode.ratio_rows(measured, table, headline=headline)
        short = [row for row in rows if row.figure == "tpot_ratio_vs_tp2_8x64k"]
        assert [row.value for row in short] == [expected]


def test_stock_runs_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEMKV_SERVE_PORT", "1")
    stock = BUILT_IN["dense-tp2"]
    settings = stock.serve_settings(model_dir=tmp_path, capacity_tokens=1024, batch=8)
    env = stock.child_env(settings, tmp_path)
    assert not [key for key in env if key.startswith("TANDEMKV_")]
    assert "SGLANG_PLUGINS" not in env
    flags = stock.sglang_flags(settings)
    assert flags[-2:] == ["--tp-size", "2"]
    assert "tandemkv" not in flags


def test_ours_runs_with_its_settings(tmp_path: Path) -> None:
    own = Configuration(settings={"selection.budget_tokens": 512}, env={"X": "1"})
    asked = own.serve_settings(model_dir=tmp_path, capacity_tokens=2048, batch=3)
    env = own.child_env(asked, tmp_path / "run")
    settings = RankSettings.model_validate_json(env[SETTINGS_VARIABLE])
    assert settings.selection.budget_tokens == 512
    assert settings.cache.capacity_tokens == 2048
    assert (env["SGLANG_PLUGINS"], env["X"]) == ("tandemkv", "1")
    assert env["PATH"] == os.environ["PATH"]


def test_ours_gets_the_flags_that_serve_gives(tmp_path: Path) -> None:
    own = Configuration(settings={"device": "cpu"}, flags=("--log-level", "info"))
    settings = own.serve_settings(model_dir=tmp_path, capacity_tokens=2048, batch=3)
    flags = own.sglang_flags(settings)
    served = sglang_argv(settings, model_dir=tmp_path, device="cpu", dtype="float32", port=30000)
    assert flags == [*served[4:], "--log-level", "info"]
    assert flags[flags.index("--max-running-requests") + 1] == "3"
    assert flags[flags.index("--attention-backend") + 1] == "tandemkv"


def test_ours_runs_in_a_run_directory_that_is_removed(run: DecodeRun, tmp_path: Path) -> None:
    own = Configuration(settings={"device": "cpu"}, env={"FAKE_STEP_S": "0.001"})
    result = run_decode(replace_run(run, configurations={"ours": own}), lambda _: None)
    assert result.failures == ()
    seen = (tmp_path / "ours_batch8" / "child.log").read_text().split()
    assert len(seen) == 1
    assert not Path(seen[0]).exists()


def test_a_cache_rank_that_does_not_start_fails_its_own_points_alone(
    run: DecodeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: ServeSettings, *_: Any) -> contextlib.AbstractContextManager[None]:
        if settings.wished_link == "shared":
            raise SettingsError("the cache rank does not answer: it needs a second GPU, 1 seen")
        return contextlib.nullcontext()

    monkeypatch.setattr(decode, "cache_rank_beside", refuse)
    settings = {"device": "cpu", "cache_ranks": 1, "transport": "shared"}
    table = {
        "1+1-shared": Configuration(settings=settings, env={"FAKE_STEP_S": "0.001"}),
        "ours": Configuration(settings={"device": "cpu"}, env={"FAKE_STEP_S": "0.001"}),
    }
    result = run_decode(replace_run(run, configurations=table), lambda _: None)
    labels = {point.label for point in run.points}
    assert {f.figure for f in result.failures} == {f"tpot_ms_1+1-shared_{x}" for x in labels}
    assert all("needs a second GPU" in failure.reason for failure in result.failures)
    assert {f"tpot_ms_ours_{x}" for x in labels} <= {row.figure for row in result.rows}


def test_a_reference_has_no_cache_rank_beside_it(
    run: DecodeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> contextlib.AbstractContextManager[None]:
        raise SettingsError("started")

    monkeypatch.setattr(decode, "cache_rank_beside", refuse)
    env = {"FAKE_STEP_S": "0.001"}
    table = {
        "dense": Configuration(flags=("--device", "cpu"), env=env, is_reference=True),
        "ours": Configuration(settings={"device": "cpu"}, env=env),
    }
    result = run_decode(replace_run(run, configurations=table), lambda _: None)
    assert {failure.figure.split("_")[2] for failure in result.failures} == {"ours"}
    assert any(row.figure.startswith("tpot_ms_dense_") for row in result.rows)


@pytest.mark.parametrize(
    ("value", "two_gpus", "late"), [(None, True, 1), ("apart", True, 1), ("1", False, None)]
)
def test_a_pair_of_processes_is_laid_out_for_the_gpus_that_there_are(
    value: str | None, two_gpus: bool, late: int | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(ONE_DEVICE_VARIABLE, value)
    settings = BUILT_IN["1+1-shared"].serve_settings(
        model_dir=tmp_path, capacity_tokens=1 << 17, batch=8
    )
    assert settings.rank_settings.placement.has_far_pool is two_gpus
    assert settings.selection.late_layers == late


def test_yaml_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "more.yaml"
    entries = {
        "dense-tp1": {"is_reference": True, "flags": ["--attention-backend", "fa3"]},
        "k512": {"tp_size": 2, "settings": {"selection.budget_tokens": 512}},
    }
    path.write_text(json.dumps(entries))
    table = load_configurations(path)
    assert table["dense-tp1"].flags == ("--attention-backend", "fa3")
    assert table["k512"].tp_size == 2
    assert set(BUILT_IN) < set(table)
    assert list(pick(table, ["k512", "dense-tp1"])) == ["k512", "dense-tp1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x: {tp: 2}", "x.tp"),
        ("x: {is_reference: true, settings: {port: 1}}", "takes no settings"),
        ("[1, 2]", "a mapping"),
        ("x: [", "cannot be read"),
    ],
)
def test_wrong_yaml_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=expected):
        load_configurations(path)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"magic is unknown; known: dense-tp1"):
        pick(BUILT_IN, ["magic"])
    with pytest.raises(SettingsError, match="twice"):
        pick(BUILT_IN, ["dense-tp1", "dense-tp1"])


def test_a_setting_that_does_not_exist_is_refused_before_anything_runs(run: DecodeRun) -> None:
    wrong = {"ours": Configuration(settings={"selection.budget": 1})}
    with pytest.raises(SettingsError, match="budget"):
        run_decode(
            replace_run(run, configurations=wrong), lambda _: pytest.fail("a child was started")
        )


def test_other_versions_of_sglang_are_refused_before_anything_runs() -> None:
    check_sglang("0.5.17")
    for version in ("0.5.23", None):
        with pytest.raises(SettingsError, match=r"bench decode.*install sglang==0\.5\.17"):
            check_sglang(version)


def test_a_number_of_channels_is_a_file_of_so_many(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_model_config(BUILT_IN_CONFIGS["qwen3-8b"], model_dir, max_context=4096)
    item = with_channels(BUILT_IN["1+1-shared-served-channels64"], model_dir, tmp_path)
    settings = item.serve_settings(model_dir=model_dir, capacity_tokens=1 << 20, batch=1)
    spec = read_model_spec(model_dir, dtype="bfloat16")
    check_index_channels(settings.selection, spec)
    assert num_index_channels(settings.selection) == 64
    plain = BUILT_IN["1+1-shared-served"]
    assert with_channels(plain, model_dir, tmp_path) is plain
    with pytest.raises(ValueError, match="stock SGLang has no index"):
        Configuration(index_channels=64)


def test_a_name_that_figures_cannot_have_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "more.yaml"
    path.write_text("My-Setting: {}\n")
    with pytest.raises(SettingsError, match="name=My-Setting: lower-case letters"):
        load_configurations(path)
