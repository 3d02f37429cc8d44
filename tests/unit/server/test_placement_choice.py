# SPDX-License-Identifier: Apache-2.0
"""Where the cache rank goes if the user leaves it open."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from placement_world import SPEC, resolve
from placement_world import gpus as gpus
from timings import A100, profile_of

from tandemkv.cache_rank.policies.base import LayerShare
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE
from tandemkv.server.launch.sglang_command import sglang_argv, sglang_env
from tandemkv.server.plan import constants as constants_module
from tandemkv.server.plan import placement_choice
from tandemkv.server.plan.constants import write_profile
from tandemkv.server.plan.cost import H200


def test_a_cpu_gets_a_process(tmp_path: Path) -> None:
    settings, said = resolve(tmp_path, device="cpu", selection={"budget_tokens": 2048})
    selection = settings.selection
    assert (settings.cache_ranks, selection.dense_batch_tokens) == (1, None)
    assert selection.dense_tokens == selection.row_tokens == 4 + 2048 + 64 + 1024
    placement = settings.rank_settings.placement
    assert (placement.link, placement.num_cache_ranks, placement.tp_size) == ("shared", 1, 1)
    assert placement.model_device == "cpu"
    assert placement.reason == "the default on a CPU"
    assert said == [f"placement: {placement.describe()}"]


def test_one_gpu_is_its_own_cache_rank(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    settings, said = resolve(tmp_path)
    assert (
        settings.cache_ranks,
        settings.tensor_parallel,
        settings.rank_settings.placement.link,
    ) == (0, 1, "local")
    assert settings.selection.dense_tokens is not None
    assert 4096 < settings.selection.dense_tokens < 65536
    assert settings.selection.dense_batch_tokens is not None
    assert 16384 < settings.selection.dense_batch_tokens < 65536  # one alone
    assert "; in-process-tp1: " in said[0]
    assert "attend to everything" in said[1]


def test_predictions_are_those_of_the_machines_profile(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants_module, "visible_gpu", lambda: A100)
    gpus(1)
    of_h200, said = resolve(tmp_path)
    assert said[0].count("constants of one H200") == 1
    assert said[1].endswith("selecting pays beyond, by constants of one H200")
    assert said[2] == f"predicted times: {constants_module.ADVICE}"
    slow = replace(H200, attention_bandwidth=H200.attention_bandwidth / 4)
    profile = profile_of(slow)
    path = write_profile(profile)
    own, said = resolve(tmp_path)
    assert own.selection.dense_tokens is not None
    assert of_h200.selection.dense_tokens is not None
    assert own.selection.dense_tokens < of_h200.selection.dense_tokens
    assert own.selection.dense_batch_tokens < of_h200.selection.dense_batch_tokens  # type: ignore[operator]
    assert f"constants of {profile.origin}" in said[0]
    assert said[1].endswith(f"by constants of {profile.origin}")
    assert [line.split()[:2] for line in said[2:]] == [["planned", "for"]]
    path.write_text("{}")
    again, said = resolve(tmp_path)
    assert again.selection.dense_tokens == of_h200.selection.dense_tokens
    assert f"predicted times: the profile {path} is no profile" in said[2]


def test_two_gpus_split_the_heads(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    settings, said = resolve(tmp_path)
    assert (settings.cache_ranks, settings.tensor_parallel) == (0, 2)
    assert "1+1" in said[0]


def test_one_gpu_for_the_model_is_kept_where_it_was_asked_for(tmp_path: Path, gpus: Any) -> None:
    for count in (2, 8):
        gpus(count)
        settings, said = resolve(tmp_path, tensor_parallel=1)
        assert settings.tensor_parallel == 1, said
        assert (settings.cache_ranks, "in-process-tp2" in said[0]) in ((0, False), (1, False))
        assert "1+1" in said[0]
    gpus(2, peers=False)
    settings, said = resolve(tmp_path, tensor_parallel=1)
    assert (settings.cache_ranks, settings.tensor_parallel) == (0, 1), said


def test_the_load_that_was_planned_for_is_told(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    _, said = resolve(tmp_path)
    assert said[-1].startswith("planned for 8 requests of 65536 tokens (--cache-tokens 524288 /")
    assert not any(line.startswith("warning:") for line in said)
    _, said = resolve(tmp_path, cache={"capacity_tokens": 49152})
    assert said[-2].startswith("planned for 8 requests of 6144 tokens")
    assert said[-1].startswith("warning: tandemkv gains nothing at that load")
    _, said = resolve(tmp_path, "cpu", selection={"budget_tokens": 2048})
    assert not any("planned for" in line for line in said)


def test_a_model_with_windows_stays_on_one_gpu(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    spec = msgspec.structs.replace(SPEC, windowed_layers=tuple(range(0, 36, 2)))
    settings, said = resolve(tmp_path, spec=spec)
    assert settings.cache_ranks == 0
    assert "1+1" not in said[0].split("; ", 1)[0]
    for given in ({"cache_ranks": 1}, {"transport": "shared"}):
        with pytest.raises(SettingsError, match=r"sliding window.*--cache-ranks 0"):
            resolve(tmp_path, spec=spec, **given)


@pytest.mark.parametrize("given", [{"cache_ranks": 1}, {"transport": "shared"}])
def test_a_cache_rank_on_two_gpus_is_a_process_that_maps_memory(
    tmp_path: Path, gpus: Any, given: dict[str, Any]
) -> None:
    gpus(2)
    settings, said = resolve(tmp_path, **given)
    placement = settings.rank_settings.placement
    assert (placement.link, placement.num_cache_ranks) == ("shared", 1)
    assert (placement.two_gpus, placement.has_far_pool) == (True, True)
    assert placement_choice._load(settings, SPEC).longest_tokens == SPEC.max_context
    assert settings.selection.dense_tokens is None
    assert settings.selection.late_layers == 1
    assert "on a GPU of its own" in said[0]


def test_two_gpus_are_a_pair_of_processes_where_that_is_fastest(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Head maps keep a model on one GPU, so that no split over two is faster.
    maps = ((0, 1, 2, 3, 4, 5, 6, 7), (1, 0, 2, 3, 4, 5, 6, 7)) * 18
    share = LayerShare(tuple(0 for _ in range(36)), maps)
    monkeypatch.setattr(placement_choice, "find_share", lambda *_: share)
    gpus(2)
    settings, said = resolve(tmp_path)
    assert (settings.cache_ranks, settings.wished_link) == (1, "shared"), said
    gpus(2, peers=False)
    settings, said = resolve(tmp_path)
    assert (settings.cache_ranks, settings.tensor_parallel) == (0, 1), said


def test_gpus_that_the_heads_do_not_divide_into_are_left(tmp_path: Path, gpus: Any) -> None:
    for count, tp_size in ((3, 2), (5, 4), (6, 4), (12, 8)):
        gpus(count)
        settings, said = resolve(tmp_path)
        assert (settings.cache_ranks, settings.tensor_parallel) == (0, tp_size), said


def test_tp_that_was_given_stays(tmp_path: Path, gpus: Any) -> None:
    gpus(4)
    settings, said = resolve(tmp_path, tensor_parallel=2)
    assert (settings.cache_ranks, settings.tensor_parallel) == (0, 2)
    assert said[0].endswith("; --tp 2 splits the cache as well")
    assert "model on 2 GPUs" in said[0]
    for given in ({"transport": "shared"}, {"cache_ranks": 2}):
        settings, said = resolve(tmp_path, tensor_parallel=2, **given)
        placement = settings.rank_settings.placement
        assert (settings.cache_ranks, placement.num_cache_ranks, placement.two_gpus) == (2, 2, True)
        assert "model on 2 GPUs, cache rank of each in a process of its own" in said[0]
    gpus(3)
    for count, refused in ((2, "needs 4 GPUs, 3 seen"), (1, "on GPUs.* --cache-ranks 2 or 0")):
        with pytest.raises(SettingsError, match=refused):
            resolve(tmp_path, tensor_parallel=2, cache_ranks=count)


def test_a_standby_is_kept_where_the_cache_rank_is_started(tmp_path: Path) -> None:
    given: dict[str, Any] = {"standby": True, "selection": {"budget_tokens": 2048}}
    settings, _ = resolve(tmp_path, "cpu", transport="message", **given)
    assert settings.standby
    far = {"cache_rank_address": "tcp://10.0.0.2:7400", "link_keys": "keys"}
    with pytest.raises(SettingsError, match="give --standby to `tandemkv cache-rank --address`"):
        resolve(tmp_path, "cpu", **far, **given)


def test_by_messages_the_other_gpu_may_be_another_hosts(tmp_path: Path, gpus: Any) -> None:
    far = {"cache_rank_address": "tcp://10.0.0.2:7400", "link_keys": "keys"}
    gpus(1)
    settings, said = resolve(tmp_path, **far)
    assert settings.rank_settings.placement.has_far_host
    assert "link message: model on cuda" in said[0]
    with pytest.raises(SettingsError, match="needs 2 GPUs, 1 seen"):
        resolve(tmp_path, transport="message")
    gpus(4)
    assert resolve(tmp_path, transport="message")[0].cache_ranks == 1
    assert resolve(tmp_path, transport="message", tensor_parallel=2)[0].cache_ranks == 2
    gpus(2, gib=80)
    with pytest.raises(SettingsError):  # the model's GPU has all K/V as well
        resolve(tmp_path, transport="message")


def test_processes_on_a_cpu_have_a_cache_rank_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 7})
    for given in ({}, {"transport": "shared"}, {"cache_ranks": 2}):
        settings, said = resolve(
            tmp_path, device="cpu", tensor_parallel=2, selection={"budget_tokens": 2048}, **given
        )
        assert (settings.cache_ranks, settings.wished_link or "shared") == (2, "shared")
        assert "model on 2 processes" in said[0]
    env = sglang_env(settings, {}, run_dir=tmp_path, device="cpu")
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "3|4,7"
    given_by_user = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    env = sglang_env(settings, given_by_user, run_dir=tmp_path, device="cpu")
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    alone = settings.model_copy(update={"tensor_parallel": 1})
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in sglang_env(
        alone, {}, run_dir=tmp_path, device="cpu"
    )
    with pytest.raises(SettingsError, match=r"may use 3; use --tp 3 or less"):
        resolve(tmp_path, device="cpu", tensor_parallel=4)


def test_processes_on_a_cpu_may_have_their_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a model with linear attention have them unless told otherwise."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    linear = msgspec.structs.replace(SPEC, linear_layers=(0, 1, 2))
    for given in ({"cache_ranks": 0}, {"spec": linear}):
        selection = {"budget_tokens": 2048}
        settings, said = resolve(
            tmp_path, device="cpu", tensor_parallel=2, selection=selection, **given
        )
        placement = settings.rank_settings.placement
        assert (placement.link, placement.num_cache_ranks, placement.tp_size) == ("local", 0, 2)
        assert "model on 2 processes, cache rank of each in SGLang's process" in said[0]


def test_a_cpu_has_no_pages_of_int4(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="use --index-dtype int8"):
        resolve(tmp_path, device="cpu", cache_ranks=0)


def test_one_device_stands_for_two_gpus_where_tests_ask_for_it(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as between two, but what has to be there; other refusals stay."""
    pair: dict[str, Any] = {"cache_ranks": 1, "transport": "shared"}
    predicting = {"selection": {"budget_tokens": 2048, "predictor_dtype": "int8"}}
    gpus(1)
    for value in ("0", "", "apart"):
        monkeypatch.setenv(ONE_DEVICE_VARIABLE, value)
        if value != "apart":
            with pytest.raises(SettingsError, match="needs 2 GPUs, 1 seen"):
                resolve(tmp_path, **pair)
            continue
        for device in ("cpu", "cuda"):
            settings, said = resolve(tmp_path, device=device, **pair | predicting)
            assert (settings.cache_ranks, settings.rank_settings.placement.two_gpus) == (1, True)
            assert (settings.selection.num_late, len(said)) == (1, 3)
            assert said[1].startswith(f"{ONE_DEVICE_VARIABLE}: ")
            assert settings.selection.dense_tokens is None
    with pytest.raises(SettingsError, match="needs 2 GPUs, 1 seen"):
        resolve(tmp_path, tensor_parallel=2, **pair | {"cache_ranks": 2})
    with pytest.raises(SettingsError, match="GiB usable"):
        resolve(tmp_path, **pair | {"cache": {"capacity_tokens": 1 << 21}})
    gpus(1, gib=92)  # K/V of 512K tokens take 72 GiB, and now the weights lie there, too
    with pytest.raises(SettingsError, match="GiB usable"):
        resolve(tmp_path, **pair)
    monkeypatch.delenv(ONE_DEVICE_VARIABLE)
    gpus(2, gib=92)
    assert resolve(tmp_path, **pair)[0].rank_settings.placement.two_gpus


def test_what_was_asked_for_stays(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    settings, said = resolve(
        tmp_path, cache_ranks=1, transport="shared", selection={"late_layers": 0}
    )
    assert (settings.cache_ranks, settings.rank_settings.placement.link) == (1, "shared")
    assert [line.rpartition("; ")[2] for line in said] == ["--transport shared was given"]
    settings, said = resolve(
        tmp_path, cache_ranks=0, selection={"budget_tokens": 512, "dense_tokens": 9000}
    )
    assert (settings.selection.dense_tokens, len(said)) == (9000, 1)
    settings, _ = resolve(tmp_path, "cpu", transport="local", selection={"budget_tokens": 2048})
    assert (settings.cache_ranks, settings.rank_settings.placement.link) == (0, "local")
    assert settings.selection.dense_batch_tokens is None
    both = {"budget_tokens": 512, "dense_batch_tokens": 9000}
    settings, said = resolve(tmp_path, cache_ranks=0, selection=both)
    assert settings.selection.dense_batch_tokens == 9000
    assert "in all" not in said[1]
    for name in ("dense_tokens", "dense_batch_tokens"):  # all is at hand
        settings, _ = resolve(tmp_path, device="cpu", selection={name: 9000})
        assert getattr(settings.selection, name) == 9000
    gpus(2)
    with pytest.raises(SettingsError, match="dense_batch_tokens=9000: with transport=shared"):
        resolve(tmp_path, cache_ranks=1, selection=both, transport="shared")


def test_shared_selections_stay_in_process(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    fraction = {"policy": "kascade", "options": {"fraction": 0.1}}
    assert resolve(tmp_path, selection=fraction)[0].cache_ranks == 0
    sparse = {"policy": "look_ahead", "share_layers": True, "exact_layers": ()}
    for shared in ({"policy": "kascade"}, sparse):
        settings, _ = resolve(tmp_path, selection=shared)
        assert (settings.cache_ranks, settings.tensor_parallel) == (0, 2)
        assert settings.selection.index_dtype == "int4"
        assert settings.selection.anchors == (0, 2, 7, 14, 23)  # shipped, each head its own


def test_head_maps_keep_heads_on_one_gpu(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    maps = ((0, 1, 2, 3, 4, 5, 6, 7), (1, 0, 2, 3, 4, 5, 6, 7)) * 18
    share = LayerShare(tuple(0 for _ in range(36)), maps)
    monkeypatch.setattr(placement_choice, "find_share", lambda *_: share)
    settings, said = resolve(tmp_path, selection={"policy": "kascade"})
    assert settings.tensor_parallel == 1, said
    assert settings.selection.anchors == ()


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path, gpus: Any) -> None:
    gpus(1, gib=40)
    with pytest.raises(SettingsError, match=r"GiB usable; .*would fit.*tandemkv plan"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("count", "changes", "said"),
    [
        (1, {"cache_ranks": 1}, "needs 2 GPUs, 1 seen"),
        (2, {"cache_ranks": 1, "cache": {"capacity_tokens": 1 << 21}}, "each cache GPU needs"),
        (1, {"cache_ranks": 0, "tensor_parallel": 2}, "needs 2 GPUs, 1 seen"),
        (1, {"cache_ranks": 0, "cache": {"capacity_tokens": 1 << 21}}, "GiB usable"),
    ],
)
def test_what_was_asked_for_has_to_fit(
    tmp_path: Path, gpus: Any, count: int, changes: dict[str, Any], said: str
) -> None:
    gpus(count)
    with pytest.raises(SettingsError, match=said):
        resolve(tmp_path, **changes)


def test_more_than_a_gpus_books_hold_is_refused(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    with pytest.raises(SettingsError, match="36868 tokens would be resident"):
        resolve(tmp_path, selection={"budget_tokens": 18432, "resident_factor": 2.0})
    resolve(tmp_path, device="cpu", selection={"budget_tokens": 18432, "resident_factor": 2.0})


def test_an_index_by_pages_needs_a_page_of_recent_tokens(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    few = {"index_dtype": "int4", "num_recent_tokens": 32}
    with pytest.raises(SettingsError, match="use --recent-tokens 64, or --index-dtype native"):
        resolve(tmp_path, selection=few)
    resolve(tmp_path, selection=few | {"num_recent_tokens": 64})


def test_a_gpu_scans_int4_unless_told_otherwise(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    plain = {"budget_tokens": 2048}
    assert resolve(tmp_path, selection=plain)[0].selection.index_dtype == "int4"
    kept = resolve(tmp_path, selection=plain | {"index_dtype": "int8"})[0]
    assert kept.selection.index_dtype == "int8"
    short = resolve(tmp_path, selection=plain | {"num_recent_tokens": 32})[0]
    assert short.selection.index_dtype == "native"
    assert resolve(tmp_path, device="cpu", selection=plain)[0].selection.index_dtype == "native"
    # A slow step attends to the keys themselves, and selects with the same numbers.
    slow = resolve(tmp_path, selection=plain | {"policy": "sfi"})[0].selection
    assert (slow.index_dtype, slow.num_recent_tokens) == ("native", 64)


@pytest.mark.parametrize(
    ("selection", "recent"),
    [
        ({}, 128),
        ({"index_dtype": "int4"}, 128),
        ({"num_recent_tokens": 64}, 64),
        ({"num_recent_tokens": 200}, 200),
        ({"index_dtype": "int8"}, 64),
        ({"budget_tokens": 100}, 64),  # no room for more
        ({"policy": "streaming"}, 64),
    ],
    ids=str,
)
def test_an_int4_index_comes_with_as_many_recent_tokens_as_a_long_page(
    tmp_path: Path, gpus: Any, selection: dict[str, Any], recent: int
) -> None:
    gpus(1)
    settings = resolve(tmp_path, selection={"budget_tokens": 2048} | selection)[0]
    assert settings.selection.num_recent_tokens == recent
    argv = sglang_argv(settings, model_dir=tmp_path, device="cuda", dtype="bfloat16", port=1)
    for chunk in (8192, 192):
        chunked = settings.model_copy(update={"chunked_prefill_size": chunk})
        size = 128 if recent >= 128 and settings.selection.index_dtype == "int4" else 64
        if chunk % size == 0:
            sglang_argv(chunked, model_dir=tmp_path, device="cuda", dtype="bfloat16", port=1)
            continue
        with pytest.raises(SettingsError, match="multiple of the 128 tokens of a page; use 256"):
            sglang_argv(chunked, model_dir=tmp_path, device="cuda", dtype="bfloat16", port=1)
    is_long = recent >= 128 and settings.selection.index_dtype == "int4"
    assert argv[argv.index("--page-size") + 1] == ("128" if is_long else "64")


def test_a_page_size_that_sglang_refuses_is_left_to_it(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    more: dict[str, Any] = {"chunked_prefill_size": 4096, "sglang_args": ("--page-size", "00")}
    settings, _ = resolve(tmp_path, **more)
    argv = sglang_argv(settings, model_dir=tmp_path, device="cuda", dtype="bfloat16", port=1)
    assert argv[-2:] == ("--page-size", "00")


def test_a_pair_has_late_layers_and_a_w_q_of_its_own(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    selection = {"budget_tokens": 2048, "late_layers": 2, "predictor_dtype": "int8"}
    settings, _ = resolve(tmp_path, selection=selection, cache_ranks=1)
    assert (settings.selection.num_late, settings.selection.predictor_dtype) == (2, "int8")


@pytest.mark.parametrize(
    ("selection", "late"),
    [
        ({}, 1),
        ({"late_layers": 0}, 0),
        ({"late_layers": 2}, 2),
        ({"exact_layers": [0, 1]}, None),
        ({"policy": "async_spade"}, None),
    ],
)
def test_a_first_layer_is_late_between_two_gpus(
    tmp_path: Path, gpus: Any, selection: dict[str, Any], late: int | None
) -> None:
    gpus(2)
    settings, said = resolve(
        tmp_path, "cuda", selection={"budget_tokens": 2048, **selection}, cache_ranks=1
    )
    assert settings.selection.late_layers == late
    is_told = any(
        line.startswith("layer 0 uses tokens selected at the end of the step before, because")
        and line.endswith("--late-layers 0 turns that off")
        for line in said
    )
    assert is_told is (late == 1), "only what was left open"
    alone, _ = resolve(tmp_path, "cuda", selection={"budget_tokens": 2048}, cache_ranks=0)
    assert alone.selection.num_late == 0


def test_no_layer_is_late_between_cpus_unless_asked_for(tmp_path: Path) -> None:
    """Only between GPUs was it measured what a late layer costs and saves."""
    far: dict[str, Any] = {"cache_rank_address": "tcp://10.0.0.2:7400", "link_keys": "keys"}
    for given in ({"transport": "message"}, far):
        for more, late in (({}, None), ({"late_layers": 1}, 1)):
            asked = {"budget_tokens": 2048, **more}
            settings, said = resolve(tmp_path, "cpu", selection=asked, **given)
            assert settings.rank_settings.placement.has_far_pool
            assert settings.selection.late_layers == late
            assert not [line for line in said if "--late-layers 0" in line]


def test_a_model_of_few_layers_has_no_late_ones(tmp_path: Path, gpus: Any) -> None:
    """By default none, and where they are asked for it says what to do."""
    gpus(2)
    few: dict[str, Any] = {"spec": msgspec.structs.replace(SPEC, num_layers=4), "cache_ranks": 1}
    selection = {"budget_tokens": 2048, "options": {"distance": 3}}
    settings, _ = resolve(tmp_path, "cuda", selection=selection, **few)
    assert settings.selection.late_layers is None
    with pytest.raises(SettingsError, match=r"too many for 4 layers.*use --late-layers 0"):
        resolve(tmp_path, "cuda", selection={**selection, "late_layers": 1}, **few)
    enough, _ = resolve(
        tmp_path, "cuda", selection={**selection, "options": {"distance": 2}}, **few
    )
    assert enough.selection.late_layers == 1
