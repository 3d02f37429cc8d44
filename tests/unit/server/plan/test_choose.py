# SPDX-License-Identifier: Apache-2.0
"""What is recommended, what is refused and with which numbers; the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.server.cli.commands import app
from tandemkv.server.plan import command
from tandemkv.server.plan.choose import (
    break_even_batch_tokens,
    break_even_tokens,
    check_fits,
    choose_placement,
    largest_fitting,
)
from tandemkv.server.plan.constants import Constants
from tandemkv.server.plan.cost import H200, predict_step
from tandemkv.server.plan.footprint import GIB, USABLE_FRACTION, index_bytes, memory_of
from tandemkv.server.plan.placement import Placement, PlacementKind, possible_placements
from tandemkv.server.plan.shape import find_shape
from tandemkv.server.plan.workload import Workload

QWEN = find_shape("qwen3-8b")
LOAD = Workload.from_selection(
    SelectionSettings(index_dtype="int4"), context_tokens=65536, concurrency=8
)
H200_BYTES = 139 * GIB
IN_PROCESS = Placement(kind=PlacementKind.IN_PROCESS, tp_size=1)


def test_selection_settings_become_a_workload() -> None:
    assert (LOAD.num_resident, LOAD.num_recent_tokens, LOAD.fetch_cap_tokens) == (900, 64, 448)
    assert LOAD.exact_layers == ()
    assert LOAD.selects
    streaming = resolve_selection({"policy": "streaming"})
    load = Workload.from_selection(streaming, context_tokens=10, concurrency=1)
    assert load.exact_layers == (0, 1)
    assert (load.num_resident, load.selects, load.index_dtype) == (4, False, "native")


def test_takes_the_fastest_that_fits() -> None:
    choice = choose_placement(possible_placements(QWEN, 2), QWEN, LOAD, gpu_bytes=H200_BYTES)
    assert choice.chosen is not None
    own = [plan for plan in choice.plans if plan.placement.kind is not PlacementKind.DENSE]
    assert choice.chosen.step.tpot_ms == min(plan.step.tpot_ms for plan in own)
    assert choice.plans[0].placement.name == "dense-tp2"
    assert "stock SGLang" in choice.reason
    assert choice.reason.startswith("least predicted time per token, ")


def test_takes_what_the_version_offers() -> None:
    choice = choose_placement(
        possible_placements(QWEN, 2),
        QWEN,
        LOAD,
        gpu_bytes=H200_BYTES,
        available={"1+1", "dense-tp2"},
    )
    assert choice.chosen is not None
    assert choice.chosen.placement.name == "1+1"
    none = choose_placement(
        possible_placements(QWEN, 1), QWEN, LOAD, gpu_bytes=H200_BYTES, available={"1+1"}
    )
    assert none.chosen is None
    assert "none of the placements" in none.reason


def test_recommends_what_serve_takes_and_says_what_never_ran() -> None:
    choice = choose_placement(possible_placements(QWEN, 8), QWEN, LOAD, gpu_bytes=H200_BYTES)
    assert choice.chosen is not None
    assert choice.chosen.placement.is_chosen
    assert choice.chosen.placement.name == "in-process-tp8"
    assert "in-process-tp8 was never run on GPUs" in choice.reason
    faster = [
        plan.placement.name
        for plan in choice.plans[1:]
        if plan.step.tpot_ms < choice.chosen.step.tpot_ms
    ]
    assert faster
    assert f"serve takes {', '.join(faster)} only if its flags" in choice.reason
    assert "least predicted time per token of those that serve takes by itself, " in choice.reason
    # Of 1 + 7 GPUs the last ones hold what no other placement does.
    full = replace(LOAD, concurrency=48, context_tokens=131072)
    choice = choose_placement(possible_placements(QWEN, 8), QWEN, full, gpu_bytes=H200_BYTES)
    assert (
        choice.chosen is None
        or choice.chosen.placement.is_chosen
        or (f"serve takes {choice.chosen.placement.name} only if its flags" in choice.reason)
    )


def test_serve_and_plan_choose_among_the_same_placements() -> None:
    unasked = {
        item.name
        for gpus in range(1, 17)
        for item in possible_placements(QWEN, gpus)[1:]
        if item.is_chosen
    }
    assert unasked == {"1+1", *(f"in-process-tp{size}" for size in (1, 2, 4, 8))}
    alone = possible_placements(QWEN, 8, 1)
    assert [item.name for item in alone] == ["dense-tp1", "in-process-tp1", "1+1", "1+7"]


def test_says_when_stock_is_no_slower() -> None:
    load = replace(LOAD, context_tokens=900)
    choice = choose_placement(possible_placements(QWEN, 1), QWEN, load, gpu_bytes=H200_BYTES)
    assert "tandemkv gains nothing" in choice.reason
    assert "whole context is resident" in choice.reason


def test_refusal_has_the_numbers() -> None:
    load = replace(LOAD, concurrency=64)
    with pytest.raises(SettingsError) as caught:
        check_fits(IN_PROCESS, QWEN, load, gpu_bytes=H200_BYTES)
    text = str(caught.value)
    total = memory_of(IN_PROCESS, QWEN, load).inference.total / GIB
    assert f"needs {total:.1f} GiB" in text
    assert "of 132.0 GiB usable" in text  # 0.95 x 139
    assert "kv 576.0" in text  # 64 x 65536 x 147456 B
    fitting = largest_fitting(IN_PROCESS, QWEN, load, "concurrency", gpu_bytes=H200_BYTES)
    assert f"{fitting} requests of this length would fit" in text
    check_fits(IN_PROCESS, QWEN, replace(load, concurrency=fitting), gpu_bytes=H200_BYTES)
    with pytest.raises(SettingsError):
        check_fits(IN_PROCESS, QWEN, replace(load, concurrency=fitting + 1), gpu_bytes=H200_BYTES)


def test_a_gpu_too_small_for_the_weights_is_refused_without_advice_on_requests() -> None:
    with pytest.raises(SettingsError, match=r"use more GPUs .*or a smaller model"):
        check_fits(IN_PROCESS, QWEN, LOAD, gpu_bytes=12 * GIB)


def test_too_many_requests_at_any_length_are_told_how_long_one_may_be() -> None:
    with pytest.raises(SettingsError, match=r"; one request of \d+ tokens would fit") as caught:
        check_fits(IN_PROCESS, QWEN, replace(LOAD, context_tokens=131072), gpu_bytes=22 * GIB)
    tokens = int(str(caught.value).rpartition("request of ")[2].split()[0])
    alone = replace(LOAD, concurrency=1, context_tokens=tokens)
    check_fits(IN_PROCESS, QWEN, alone, gpu_bytes=22 * GIB)


@given(
    context=st.integers(1, 1 << 20),
    concurrency=st.integers(1, 512),
    gpus=st.integers(1, 8),
    gib=st.integers(1, 200),
)
def test_refuses_exactly_what_does_not_fit(
    context: int, concurrency: int, gpus: int, gib: int
) -> None:
    load = replace(LOAD, context_tokens=context, concurrency=concurrency)
    choice = choose_placement(possible_placements(QWEN, gpus), QWEN, load, gpu_bytes=gib * GIB)
    for placement in possible_placements(QWEN, gpus):
        needed = memory_of(placement, QWEN, load).largest.total
        if needed <= USABLE_FRACTION * gib * GIB:
            check_fits(placement, QWEN, load, gpu_bytes=gib * GIB)
        else:
            with pytest.raises(SettingsError, match="GiB"):
                check_fits(placement, QWEN, load, gpu_bytes=gib * GIB)
    own_fit = [plan for plan in choice.plans[1:] if plan.fits]
    assert (choice.chosen is not None) == bool(own_fit)
    if choice.chosen is None:
        assert "do not fit" in choice.reason


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_command_prints_tables(runner: CliRunner) -> None:
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--gpus", "2"])
    assert result.exit_code == 0
    for part in ("1 inference + 1 cache GPU", "key index", "TPOT", "recommended", "132.0 usable"):
        assert part in result.output
    assert "never run on GPUs" not in result.output
    found = break_even_tokens(QWEN, replace(LOAD, num_recent_tokens=128), 2)
    assert f"break-even: requests of up to {found} tokens" in result.output
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--gpus", "4"])
    assert "2 inference + 2 cache GPUs" in result.output
    assert "never run on GPUs" not in result.output
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--gpus", "8"])
    assert "4 inference + 4 cache GPUs (never run on GPUs)" in result.output


def test_the_command_has_the_context_and_its_limit_is_told(runner: CliRunner) -> None:
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--context", "64k"])
    assert "--max-context 65536" in result.output
    assert "65536 tokens are more than the 40960 of max_position_embeddings" in result.output
    assert '"max_position_embeddings": 65536, "rope_scaling": {"rope_type": "yarn"' in result.output
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--context", "32k"])
    assert "--max-context 32768" in result.output
    assert "max_position_embeddings" not in result.output


def test_memory_is_that_of_the_smallest_gpu_here(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (80 * GIB, 79 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i])
    )
    monkeypatch.setattr(command, "constants_here", lambda: Constants(H200, ""))
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--context", "8k"])
    assert "75.0 usable" in result.output  # 0.95 x 79
    result = runner.invoke(
        app, ["plan", "--model", "qwen3-8b", "--context", "8k", "--gpu-memory", "139"]
    )
    assert "132.0 usable" in result.output


def test_tables_lose_nothing_on_a_narrow_terminal(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--gpus", "4"])
    assert "…" not in result.output
    words = " ".join(result.output.replace("│", " ").split())
    for part in ("selection scratch", "key index", "collectives", "resident set"):
        # A cell's lines are apart in the output, with those of its neighbours between.
        assert all(word in words for word in part.split()), result.output


def test_command_prints_json_of_the_same_plan(runner: CliRunner) -> None:
    arguments = ["plan", "--model", "qwen3-8b", "--gpus", "2", "--index-dtype", "int4", "--json"]
    result = runner.invoke(app, [*arguments, "--budget-tokens", "512", "--exact-layers", "none"])
    printed = json.loads(result.stdout)
    assert printed["workload"]["num_resident"] == 4 + 512
    assert printed["workload"]["exact_layers"] == []
    assert [item["name"] for item in printed["placements"]] == [
        "dense-tp2", "in-process-tp2", "1+1",
    ]  # fmt: skip
    load = Workload(
        context_tokens=65536, concurrency=8, num_resident=516, num_recent_tokens=128,
        fetch_cap_tokens=128, exact_layers=(), index_dtype="int4",
    )  # fmt: skip
    assert [item["has_run_on_gpus"] for item in printed["placements"]] == [True] * 3
    assert [item["chosen_by_serve"] for item in printed["placements"]] == [False, True, True]
    assert sorted(printed["break_even"]) == ["batch_tokens", "tokens"]
    assert 512 < printed["break_even"]["tokens"] < 65536
    placement = Placement(kind=PlacementKind.SEPARATE, tp_size=1, num_cache_gpus=1)
    memory = memory_of(placement, QWEN, load)
    assert memory.cache is not None
    assert printed["placements"][2]["bytes_per_gpu"]["cache"]["total"] == memory.cache.total


@pytest.mark.parametrize(
    ("selection", "scanned"),
    [
        ({}, 36),
        ({"exact_layers": (0, 1)}, 34),
        ({"policy": "kascade"}, 5),
        ({"policy": "kascade", "anchors": (0, 2, 7)}, 2),  # nobody follows layer 0
        ({"policy": "kascade", "anchors": (0, 5, 20)}, 3),  # 2 to 4 follow it
        ({"policy": "kascade", "anchors": (20,)}, 19),  # 2 to 19 have no anchor before them
        ({"policy": "kascade", "anchors": (0,)}, 1),
        ({"share_layers": True, "anchors": (2, 9, 20), "exact_layers": ()}, 5),
    ],
)
def test_only_anchors_are_scanned(selection: dict[str, Any], scanned: int) -> None:
    chosen = resolve_selection(selection | {"index_dtype": "int4"})
    load = Workload.from_selection(chosen, context_tokens=65536, concurrency=8)
    assert load.num_scanned(36) == scanned
    layers = 36 if scanned == 34 else scanned
    assert index_bytes(QWEN, load) == 8 * 65536 * layers * 8 * 72


@pytest.mark.parametrize(
    ("more", "variable", "index"),
    [
        ([], "", "int4"),
        ([], "int8", "int8"),
        (["--index-dtype", "native"], "int8", "native"),
        (["--recent-tokens", "32"], "", "native"),
    ],
)
def test_plan_takes_the_index_that_serve_would(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, more: list[str], variable: str, index: str
) -> None:
    if variable:
        monkeypatch.setenv("TANDEMKV_SERVE_SELECTION__INDEX_DTYPE", variable)
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--json", *more])
    assert json.loads(result.output)["workload"]["index_dtype"] == index, result.output


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--model", "qwen3-8b", "--concurrency", "64"], 1, "nothing to recommend"),
        (["--model", "gpt5"], 2, "one of smollm2, qwen3-8b,"),
        (["--model", "qwen3-8b", "--policy", "magic"], 2, "known: async_spade"),
        (["--model", "qwen3-8b", "--policy", "lfps"], 2, "policy=lfps attends on the host's CPU"),
        (["--model", "qwen3-8b", "--policy", "sync_kv"], 0, "sync_kv are not captured"),
        (
            ["--model", "qwen3-8b", "--policy", "sfi", "--gpus", "2", "--cache-ranks", "1"],
            0,
            "asked for: 1 inference + 1 cache GPU",
        ),
        (["--model", "qwen3-8b", "--policy", "quest"], 0, "reads bounds of pages"),
        (["--model", "qwen3-8b", "--set", "selection.pool_before=1"], 0, "without --pool-before"),
        (["--model", "qwen3-8b", "--budget-tokens", "5"], 2, "from --budget-tokens"),
        (["--model", "qwen3-8b", "--index-dtype", "int2"], 2, "index_dtype=int2"),
        (["--model", "qwen3-8b", "--index-channels", "/no/such"], 2, "make it with `tandemkv cal"),
        (["--model", "qwen3-8b", "--set", "max_context=9"], 2, "does not read it; use --context"),
        (["--model", "qwen3-8b", "--exact-layers", "36"], 2, "has layers 0 to 35"),
        (["--model", "qwen3-8b", "--context", "64q"], 2, "'64q' is no number of tokens"),
        (["--model", "qwen3-8b", "--context", "0"], 2, "give 1 to 1024m tokens"),
        (
            ["--model", "qwen3-8b", "--context", "48k", "--cache-tokens", "512k"],
            0,
            "8 x 49152 tokens",
        ),
        (["--model", "qwen3-8b", "--cache-tokens", "32k"], 2, "one request of 65536 tokens; raise"),
        ([], 2, "--model"),
    ],
)
def test_command_exit_codes(
    runner: CliRunner, arguments: list[str], code: int, expected: str
) -> None:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == code
    assert expected in result.output + result.stderr


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--cache-ranks", "0"), ["dense-tp1", "in-process-tp1"]),
        (("--cache-ranks", "0", "--tp", "2"), ["dense-tp2", "in-process-tp2"]),
        (("--cache-ranks", "3"), ["dense-tp4", "1+3"]),
        (("--cache-ranks", "4", "--tp", "2"), ["dense-tp4", "tp2+4"]),
        (("--set", "cache_ranks=1"), ["dense-tp2", "1+1"]),
        (("--tp", "2"), ["dense-tp2", "in-process-tp2", "tp2+2"]),
        (("--tp", "1"), ["dense-tp1", "in-process-tp1", "1+1", "1+7"]),
    ],
)
def test_a_placement_that_is_asked_for(
    runner: CliRunner, flags: tuple[str, ...], names: list[str]
) -> None:
    arguments = ["plan", "--model", "qwen3-8b", "--gpus", "8", *flags]
    printed = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert [item["name"] for item in printed["placements"]] == names
    assert printed["recommended"] in names[1:]
    output = runner.invoke(app, arguments).output
    alone = len(names) == 2
    assert ("asked for: " in output, "recommended: " in output) == (alone, not alone)
    assert ("least predicted" in output) is not alone
    command = output.partition("start it with\n  ")[2].splitlines()[0]
    (chosen,) = (x for x in printed["placements"] if x["name"] == printed["recommended"])
    want = " ".join(["/path/to/model", *chosen["serve_flags"], "--max-running-requests 8"])
    assert want in command
    assert command.count("cache-ranks") == 1
    assert "--set" not in command


def test_what_the_environment_asks_of_serve_it_asks_of_plan(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEMKV_SERVE_CACHE_RANKS", "1")
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", "--gpus", "2"])
    assert "asked for: 1 inference + 1 cache GPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cache-ranks 1", "and cache_ranks=1 take 2 GPUs, and gpus=1; use --gpus 2, or a lower"),
        ("--tp 2", "take 2 GPUs, and gpus=1; use --gpus 2, or a lower --tp"),
        ("--gpus 3 --tp 2 --cache-ranks 2", "use --gpus 4, or a lower --tp or --cache-ranks"),
        ("--gpus 8 --tp 3", "tensor_parallel=3 does not divide the 32 query and 8 KV heads"),
        ("--gpus 16 --tp 16", "use --tp 8 at most"),
        ("--gpus 16 --cache-ranks 9", "more than the 8 KV heads of qwen3-8b"),
        ("--gpus 8 --tp 4 --cache-ranks 2", "use --cache-ranks 4 or 0"),
        ("--tp 2 --set nnodes=2 --set dist_init_addr=a:1", "With --gpus 2 --tp 2 --cache-ranks 0"),
        ("--gpus 8 --tp 2 --cache-ranks 3", "one has to divide the other; use --cache-ranks 2"),
        ("--gpus 3 --cache-ranks 2 --policy sfi", "not captured"),
        ("--gpus 2 --tp 2 --set tensor_parallel=1", "set the same; give one of them"),
    ],
)
def test_a_placement_that_serve_would_refuse(
    runner: CliRunner, arguments: str, message: str
) -> None:
    result = runner.invoke(app, ["plan", "--model", "qwen3-8b", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("tp_size", [1, 2])
def test_dense_up_to_the_break_even(tp_size: int) -> None:
    load = replace(LOAD, exact_layers=())
    found = break_even_tokens(QWEN, load, tp_size)
    assert load.attended_tokens <= found + 256
    assert found < load.context_tokens
    dense = Placement(kind=PlacementKind.DENSE, tp_size=tp_size)
    own = Placement(kind=PlacementKind.IN_PROCESS, tp_size=tp_size)
    for context, is_dense_faster in ((found, True), (found + 512, False)):
        trial = replace(load, context_tokens=context)
        times = [predict_step(x, QWEN, trial).tpot_ms for x in (dense, own)]
        assert (times[0] <= times[1]) is is_dense_faster, (context, times)


def test_break_even_of_a_short_context_is_all_of_it() -> None:
    load = replace(LOAD, context_tokens=2048)
    assert break_even_tokens(QWEN, load, 1) <= max(2048, load.attended_tokens)


def test_fewer_tokens_than_requests_are_a_load_as_well() -> None:
    load = replace(LOAD, concurrency=8, context_tokens=4, capacity_tokens=4)
    assert break_even_batch_tokens(QWEN, load, 1) == load.total_tokens == 4


@pytest.mark.parametrize("concurrency", [1, 8, 48])
def test_a_batch_is_dense_up_to_what_pays_for_none_of_its_size(concurrency: int) -> None:
    load = replace(LOAD, concurrency=concurrency)
    found = break_even_batch_tokens(QWEN, load, 1)
    dense = Placement(kind=PlacementKind.DENSE, tp_size=1)
    own = Placement(kind=PlacementKind.IN_PROCESS, tp_size=1)
    for size in (1, 2, 4, 8, 32):
        trial = replace(load, concurrency=size, context_tokens=found // size)
        times = [predict_step(x, QWEN, trial).tpot_ms for x in (dense, own)]
        assert times[0] <= times[1] or size > concurrency, (size, times)
    alone = replace(load, concurrency=1, context_tokens=load.total_tokens)
    assert found <= break_even_tokens(QWEN, alone, 1)
    assert concurrency > 1 or found == break_even_tokens(QWEN, alone, 1)


@pytest.mark.parametrize(
    ("more", "command"),
    [
        (
            ["--gpus", "2", "--budget-tokens", "2048", "--exact-layers", "none"],
            "tandemkv serve /path/to/model --cache-ranks 0 --tp 2 --max-running-requests 8 "
            "--cache-tokens 524288 --max-context 65536 --budget-tokens 2048 --exact-layers none",
        ),
        (
            ["--concurrency", "1", "--policy", "kascade", "--share-layers"],
            "tandemkv serve /path/to/model --cache-ranks 0 --max-running-requests 1 "
            "--cache-tokens 65536 --max-context 65536 --policy kascade --share-layers",
        ),
        (
            ["--index-dtype", "int8"],
            "tandemkv serve /path/to/model --cache-ranks 0 --max-running-requests 8 "
            "--cache-tokens 524288 --max-context 65536 --index-dtype int8",
        ),
        (
            ["--set", "selection.fetch_cap=256", "--kv-cache-dtype", "fp8_e4m3"],
            "tandemkv serve /path/to/model --cache-ranks 0 --max-running-requests 8 --cache-tokens "
            "524288 --max-context 65536 --kv-cache-dtype fp8_e4m3 --set selection.fetch_cap=256",
        ),
    ],
)
def test_says_how_to_start_what_it_recommends(
    runner: CliRunner, more: list[str], command: str
) -> None:
    result = runner.invoke(app, ["plan", "--model", "Qwen3-8B", *more])
    assert f"start it with\n  {command}\n" in result.output, result.output


def test_the_quick_start_has_the_command_that_plan_prints(runner: CliRunner) -> None:
    page = (Path(__file__).parents[4] / "README.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"^tandemkv (plan --model /path/to/model [^#\n]*)", page, re.MULTILINE)
    arguments = given.replace("/path/to/model", "qwen3-8b").split()
    result = runner.invoke(app, [*arguments, "--gpu-memory", "139"])
    command = result.output.partition("start it with\n  ")[2].splitlines()[0]
    assert f"\n{command}\n" in page
