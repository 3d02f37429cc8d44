# SPDX-License-Identifier: Apache-2.0
"""What a measurement becomes, where it is kept, and what it decides."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timings import A100, MachineOf, profile_of
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.server.cli.commands import app
from tandemkv.server.plan import constants as constants_module
from tandemkv.server.plan.choose import break_even_tokens, choose_placement
from tandemkv.server.plan.constants import (
    constants_here,
    measure_here,
    profile_path,
    read_profile,
    write_profile,
)
from tandemkv.server.plan.cost import H200, CostConstants
from tandemkv.server.plan.device_timings import DeviceTimings, Sizes
from tandemkv.server.plan.footprint import GIB
from tandemkv.server.plan.measure import ProfileError, Timed, take_measurements
from tandemkv.server.plan.placement import possible_placements
from tandemkv.server.plan.profile import Machine
from tandemkv.server.plan.shape import find_shape
from tandemkv.server.plan.workload import Workload

QWEN = find_shape("qwen3-8b")
LOAD = Workload.from_selection(
    SelectionSettings(index_dtype="int4"), context_tokens=65536, concurrency=8
)
SLOW_ATTENTION = replace(H200, attention_bandwidth=H200.attention_bandwidth / 4)
TINY = Sizes(
    batch=2, qo_heads=4, kv_heads=2, head_dim=16, hidden=64, intermediate=96, page=16, k=32,
    num_recent=16, resident=68, fetch_cap=8, missing=8, copy_bytes=1 << 16, weight_rows=128,
    num_matrices=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are two A100 whose attention is slow."""
    monkeypatch.setattr(constants_module, "visible_gpu", lambda: A100)
    monkeypatch.setattr(constants_module, "timings_here", lambda: MachineOf(SLOW_ATTENTION))


def numbers(cost: CostConstants) -> dict[str, float]:
    return {name: value for name, value in asdict(cost).items() if name != "origin"}


_FACTOR = st.floats(0.05, 20.0)


@given(
    fixed=_FACTOR, memory=_FACTOR, attention=_FACTOR, scan=_FACTOR, topk=_FACTOR, exchange=_FACTOR
)
def test_a_measured_machine_has_its_own_constants(
    fixed: float, memory: float, attention: float, scan: float, topk: float, exchange: float
) -> None:
    own = replace(
        H200,
        weight_bandwidth=H200.weight_bandwidth * memory,
        layer_overhead_us=H200.layer_overhead_us * fixed,
        request_layer_us=H200.request_layer_us * fixed,
        attention_bandwidth=H200.attention_bandwidth * attention,
        attention_fixed_us=H200.attention_fixed_us * fixed,
        scan_fixed_us=H200.scan_fixed_us * fixed,
        scan_bandwidth_int4=H200.scan_bandwidth_int4 * scan,
        scan_bandwidth_int8=H200.scan_bandwidth_int8 * scan * 1.5,
        scan_bandwidth_native=H200.scan_bandwidth_native * scan * 0.7,
        topk_fixed_us=H200.topk_fixed_us * fixed,
        topk_bandwidth=H200.topk_bandwidth * topk,
        selection_fixed_us=H200.selection_fixed_us * fixed,
        gather_us=H200.gather_us * fixed,
        samples_bandwidth=H200.samples_bandwidth * attention,
        exchange_bandwidth=H200.exchange_bandwidth * exchange,
        receive_bandwidth=H200.exchange_bandwidth * exchange,
    )
    profile = profile_of(own)
    assert numbers(profile.constants()) == pytest.approx(numbers(own), rel=1e-6, abs=1e-6)
    kept = profile.kept()
    assert {"in_process_overlap", "handover_us"} <= set(kept)
    assert all(numbers(own)[name] == numbers(H200)[name] for name in kept)


def test_without_a_second_gpu_the_exchange_is_not_measured() -> None:
    profile = profile_of(replace(H200, exchange_bandwidth=3e9), has_peer=False)
    assert profile.constants().exchange_bandwidth == H200.exchange_bandwidth
    assert {"exchange_bandwidth", "receive_bandwidth"} <= set(profile.kept())
    assert dict(profile.rows())["second GPU to first"] == "not measured"


def test_slower_attention_makes_selecting_pay_earlier() -> None:
    slow = profile_of(SLOW_ATTENTION).constants()
    tokens = break_even_tokens(QWEN, LOAD, 1)
    assert LOAD.attended_tokens < break_even_tokens(QWEN, LOAD, 1, slow) < tokens - 1024
    short = replace(LOAD, context_tokens=tokens - 512)
    reasons = [
        choose_placement(
            possible_placements(QWEN, 1), QWEN, short, gpu_bytes=139 * GIB, cost=cost
        ).reason
        for cost in (H200, slow)
    ]
    assert "tandemkv gains nothing" in reasons[0]
    assert "tandemkv gains nothing" not in reasons[1]
    assert "times as long" in reasons[1]


def test_a_slow_link_keeps_the_cache_on_the_models_gpu() -> None:
    # Of one KV head: nothing to split, so that the choice is a second GPU or none.
    shape = replace(QWEN, num_kv_heads=1, num_qo_heads=1, head_dim=1024)
    names = []
    for cost in (H200, replace(H200, exchange_bandwidth=H200.exchange_bandwidth / 40)):
        chosen = choose_placement(
            possible_placements(shape, 2),
            shape,
            LOAD,
            gpu_bytes=139 * GIB,
            cost=profile_of(cost).constants(),
        ).chosen
        assert chosen is not None
        names.append(chosen.placement.name)
    assert names == ["1+1", "in-process-tp1"]


@pytest.mark.parametrize("name", ["attention", "samples", "scan", "select"])
def test_times_that_contradict_each_other_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineOf, name, lambda *_: Timed(1e6, 300.0))
    with pytest.raises(ProfileError, match=r"again on an idle GPU"):
        take_measurements(MachineOf(H200), lambda _: None)


def test_what_is_timed_runs_on_a_device() -> None:
    timings = DeviceTimings(torch.device("cpu"), TINY)
    timed = [
        timings.copy(),
        timings.weights(),
        timings.layer(1),
        timings.layer(2),
        timings.attention(64),
        *(timings.scan(name, 256) for name in ("native", "int8", "int4")),
        timings.select(256),
        timings.predict(),
        timings.samples(8),
    ]
    assert all(item.num_bytes > 0 and item.us > 0 for item in timed)
    assert timings.gather().us > 0
    assert timings.copy().num_bytes == 2 << 16
    assert timings.weights().num_bytes == 2 * 128 * 64 * 4
    # Rows for q, k and v, output, gate and up, down; float32.
    assert timings.layer(1).num_bytes == 4 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    assert timings.scan("int4", 256).num_bytes == 2 * 256 * 2 * (8 + 4)
    assert timings.select(256).num_bytes == 4 * 2 * 2 * 256
    assert (timings.host_copy(), timings.peer_copy(), timings.attention_by) == (
        None, None, "tandemkv",
    )  # fmt: skip


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    profile = measure_here(print)
    assert profile.measured.host_bandwidth is not None
    assert profile.measured.copy_bandwidth > profile.measured.host_bandwidth
    assert constants_here().cost == profile.constants()


def test_a_profile_is_kept_for_its_owner(cache: Path) -> None:
    profile = profile_of(SLOW_ATTENTION)
    path = write_profile(profile)
    assert path == cache / "tandemkv/profiles/nvidia-a100-sxm4-80gb.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_profile(profile.machine) == profile
    assert [*path.parent.iterdir()] == [path]


def test_a_failed_write_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = profile_of(SLOW_ATTENTION), profile_of(H200)
    path = write_profile(old)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_profile(new)
    assert read_profile(old.machine) == old
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "1.0"}, r"was taken with torch 1\.0 \(here "),
        ({"driver": "1", "sglang": "2"}, r"driver 1 \(here 570\.1\), sglang 2 \(here "),
        ({"gpu": "NVIDIA A100 SXM4 80GB"}, "gpu NVIDIA A100 SXM4 80GB"),
    ],
)
def test_a_profile_of_another_machine_is_not_used(change: dict[str, str], said: str) -> None:
    profile = profile_of(SLOW_ATTENTION)
    other = profile.model_copy(update={"machine": profile.machine.model_copy(update=change)})
    write_profile(other)
    with pytest.raises(ProfileError, match=said):
        read_profile(profile.machine)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text[:-20], "Invalid JSON"),
        (lambda text: "", "Invalid JSON"),
        (lambda text: text.replace('"schema_version":2', '"schema_version":1'), "schema_version"),
        (lambda text: text.replace('"gather_us"', '"gathering_us"'), "measured.gather"),
        (lambda text: text.replace('"copy_bandwidth":', '"copy_bandwidth":-'), "copy_bandwidth"),
        (lambda text: text + " " * 70000, "more than 65536 bytes"),
    ],
)
def test_a_damaged_profile_is_not_used(edit: Any, said: str) -> None:
    profile = profile_of(SLOW_ATTENTION)
    path = write_profile(profile)
    text = json.dumps(json.loads(path.read_text()), separators=(",", ":"))
    changed = edit(text)
    assert changed != text
    path.write_text(changed)
    with pytest.raises(ProfileError, match=re.escape(str(path))) as found:
        read_profile(profile.machine)
    assert said in str(found.value)


def test_a_profile_that_may_not_be_read_is_named(cache: Path) -> None:
    path = profile_path(A100.name)
    path.mkdir(parents=True)  # opening it fails for root, too
    with pytest.raises(ProfileError, match=re.escape(f"{path} cannot be read")):
        read_profile(Machine.of(A100))


def test_without_a_profile_the_constants_are_those_of_one_h200(a100: None) -> None:
    cost, note = constants_here()
    assert (cost, note) == (H200, constants_module.ADVICE)
    write_profile(profile_of(SLOW_ATTENTION))
    cost, note = constants_here()
    assert (cost, note) == (profile_of(SLOW_ATTENTION).constants(), "")
    profile_path(A100.name).write_text("{")
    cost, note = constants_here()
    assert cost == H200
    assert note.endswith(f"; {constants_module.ADVICE}")


def test_plan_measures_and_then_uses_it(a100: None) -> None:
    command = ["plan", "--model", "qwen3-8b", "--gpus", "2", "--gpu-memory", "80"]
    before = CliRunner().invoke(app, command)
    assert before.exit_code == 0
    assert "; constants of one H200" in before.stdout
    assert constants_module.ADVICE in before.stdout
    taken = CliRunner().invoke(app, [*command, "--measure"])
    assert taken.exit_code == 0
    assert "measuring NVIDIA A100-SXM4-80GB: about 10 s" in taken.stderr
    assert f"kept in {profile_path(A100.name)}" in taken.stderr
    assert "decode attention (flashinfer)" in taken.stderr
    assert "still of one H200: " in taken.stderr
    own = "constants of this machine (NVIDIA A100-SXM4-80GB, measured "
    assert own in taken.stdout
    after = CliRunner().invoke(app, command)
    assert own in after.stdout
    assert "--measure" not in after.stdout
    printed = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert printed["constants"]["attention_bandwidth"] == pytest.approx(
        SLOW_ATTENTION.attention_bandwidth
    )
    assert printed["constants"]["origin"].startswith("this machine")


def test_a_profile_that_cannot_be_kept_serves_one_plan(
    a100: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "tandemkv").write_text("a file where the folder would be")
    result = CliRunner().invoke(app, ["plan", "--model", "qwen3-8b", "--measure"])
    assert result.exit_code == 0
    assert "could not be kept" in result.stderr
    assert "set XDG_CACHE_HOME" in " ".join(result.stderr.split())
    assert "constants of this machine" in result.stdout


def test_a_cpu_is_not_measured() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    result = CliRunner().invoke(app, ["plan", "--model", "qwen3-8b", "--measure"])
    assert result.exit_code == 1
    assert "torch sees none" in result.stderr
    plain = CliRunner().invoke(app, ["plan", "--model", "qwen3-8b"])
    assert "; constants of one H200" in plain.stdout
    assert "--measure" not in plain.stdout


def test_what_fails_in_a_kernel_is_reported(a100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("sm_75")

    monkeypatch.setattr(constants_module, "take_measurements", fail)
    with pytest.raises(ProfileError, match=r"A100.*could not be measured: KeyError: 'sm_75'"):
        measure_here(lambda _: None)


def test_a_gpu_in_use_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants_module, "visible_gpu", lambda: A100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 80 << 30))
    with pytest.raises(ProfileError, match=r"takes 4 GiB .* 1\.0 GiB are free on cuda:0; stop"):
        measure_here(lambda _: None)
