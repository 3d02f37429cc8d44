# SPDX-License-Identifier: Apache-2.0
"""A policy that attends is served with its cache rank on the host's CPU beside the model's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from placement_world import SPEC, resolve
from placement_world import gpus as gpus

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import HOST, ONE_DEVICE_VARIABLE
from tandemkv.server.checks import preflight
from tandemkv.server.launch.sglang_command import sglang_argv
from tandemkv.server.plan.memory import estimate_memory
from tandemkv.server.settings.launch_settings import ServeSettings

LFPS = {"selection": {"policy": "lfps", "budget_tokens": 2048}}


@pytest.mark.parametrize("given", [{}, {"cache_ranks": 1}, {"transport": "shared"}])
def test_one_gpu_is_enough(tmp_path: Path, gpus: Any, given: dict[str, Any]) -> None:
    gpus(1)
    settings, said = resolve(tmp_path, **LFPS | given)
    placement = settings.rank_settings.placement
    assert (settings.cache_ranks, placement.link) == (1, "shared")
    assert (placement.host_engine, placement.two_gpus, placement.has_far_pool) == (
        True, False, True,
    )  # fmt: skip
    assert "on the host's CPU" in said[0]
    if not given:
        assert "policy lfps attends on the host's CPU" in said[0]
    assert settings.selection.dense_tokens is None
    argv = sglang_argv(settings, model_dir=tmp_path, device="cuda", dtype="bfloat16", port=1)
    assert argv[argv.index("--page-size") + 1] == "1"
    assert "--disable-cuda-graph" not in argv
    assert "--disable-overlap-schedule" not in argv


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_ranks": 0}, r"link=local has none; use --cache-ranks 1, or --device cpu"),
        ({"transport": "message"}, r"link=message has none; use --cache-ranks 1, or --device cpu"),
        ({"cache_ranks": 2}, r"cache_ranks=2 are not available; use --tp 1 --cache-ranks 1"),
        ({"tensor_parallel": 2}, r"tensor_parallel=2 and .*use --tp 1 --cache-ranks 1"),
    ],
    ids=str,
)
def test_other_placements_are_refused_with_what_to_use(
    tmp_path: Path, gpus: Any, given: dict[str, Any], said: str
) -> None:
    gpus(8)
    with pytest.raises(SettingsError, match=said):
        resolve(tmp_path, **LFPS | given)


def test_policies_that_select_keep_their_placements(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    settings, _ = resolve(tmp_path, cache_ranks=1)
    assert not settings.rank_settings.placement.host_engine


def test_the_cache_is_counted_as_the_hosts_memory(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    settings, _ = resolve(tmp_path, **LFPS)
    needed = estimate_memory(settings, SPEC, tmp_path, device="cuda")
    assert needed.kv == 8 * 65536 * SPEC.num_layers * 2 * 8 * 128 * 2
    assert needed.resident_set == needed.weights == 0  # those are the GPU's
    monkeypatch.setattr(preflight, "available_bytes", lambda: 40 << 30)
    with pytest.raises(SettingsError, match=r"kv 72\.00 .*--cache-tokens \d+ would fit"):
        preflight.check_memory(settings, SPEC, tmp_path, device="cuda")


def test_a_cpu_stands_for_the_gpu_where_tests_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, HOST)
    settings, said = resolve(tmp_path, device="cpu", **LFPS)
    assert settings.rank_settings.placement.host_engine
    assert said[1].startswith(f"{ONE_DEVICE_VARIABLE}: the CPU stands for the model's GPU")
    argv = sglang_argv(settings, model_dir=tmp_path, device="cpu", dtype="float32", port=1)
    assert "--disable-overlap-schedule" not in argv, "passes overlap as on a GPU"
    other = ServeSettings.model_validate({"model": str(tmp_path)})
    with pytest.raises(SettingsError, match="use --policy lfps"):
        other.placement_on("cpu")
