# SPDX-License-Identifier: Apache-2.0
"""K and V in FP8: what is refused at start, and how SGLang's bytes are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.exchange_settings import CacheSettings
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.sglang.pool import as_stored
from tandemkv.inference_rank.start.local import check_kv_dtype
from tandemkv.server.settings.launch_settings import ServeSettings

FP8 = RankSettings(cache=CacheSettings(kv_dtype="fp8_e4m3"))


def runner_of(kv_dtype: torch.dtype, **scales: Any) -> Any:
    attention = SimpleNamespace(**scales)
    layer = SimpleNamespace(self_attn=SimpleNamespace(attn=attention))
    return SimpleNamespace(
        device="cpu",
        kv_cache_dtype=kv_dtype,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        model=SimpleNamespace(model=SimpleNamespace(layers=[layer, layer])),
    )


def test_what_sglang_has_must_be_what_was_asked_for() -> None:
    check_kv_dtype(runner_of(torch.bfloat16), RankSettings())
    check_kv_dtype(runner_of(torch.float8_e4m3fn), FP8)
    with pytest.raises(SettingsError, match="--kv-cache-dtype fp8_e4m3"):
        check_kv_dtype(runner_of(torch.float8_e4m3fn), RankSettings())
    with pytest.raises(SettingsError, match="--kv-cache-dtype auto"):
        check_kv_dtype(runner_of(torch.bfloat16), FP8)


def test_scales_of_a_checkpoint_are_refused() -> None:
    one = {"k_scale_float": 1.0, "v_scale_float": None}
    check_kv_dtype(runner_of(torch.float8_e4m3fn, **one), FP8)
    one |= {"k_scale": torch.tensor(1.0), "v_scale": torch.ones(2)}
    check_kv_dtype(runner_of(torch.float8_e4m3fn, **one), FP8)
    with pytest.raises(SettingsError, match=r"layer 0: .* scales {'k_scale_float': 0\.5} for K"):
        check_kv_dtype(runner_of(torch.float8_e4m3fn, **{**one, "k_scale_float": 0.5}), FP8)
    for scale in (0.5, torch.tensor(0.5)):  # a file's is a number, and the other name stays empty
        runner = runner_of(torch.float8_e4m3fn, **{**one, "v_scale": scale})
        with pytest.raises(SettingsError, match=r"layer 0: .* scales {'v_scale': 0\.5} for K"):
            check_kv_dtype(runner, FP8)


def test_a_gpu_that_cannot_convert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(torch.float8_e4m3fn)
    runner.device = "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(SettingsError, match=r"compute capability 8\.9"):
        check_kv_dtype(runner, FP8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_kv_dtype(runner, FP8)


def test_bytes_are_read_as_what_they_stand_for() -> None:
    values = torch.tensor([[[1.5, -2.0]]]).to(torch.float8_e4m3fn)
    pool = SimpleNamespace(dtype=torch.float8_e4m3fn)
    (found,) = as_stored(pool, [values.view(torch.uint8)])
    assert found.float().tolist() == [[[1.5, -2.0]]]
    assert found.data_ptr() == values.data_ptr()


def test_a_policy_that_attends_itself_takes_no_fp8() -> None:
    cache = {"kv_dtype": "fp8_e4m3"}
    ServeSettings.model_validate({"model": "m", "cache": cache, "selection": {"policy": "sfi"}})
    with pytest.raises(ValueError, match="policy=lfps attends to K and V itself"):
        ServeSettings.model_validate(
            {"model": "m", "cache": cache, "selection": {"policy": "lfps"}}
        )
