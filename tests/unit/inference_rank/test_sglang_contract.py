# SPDX-License-Identifier: Apache-2.0
"""A wrong SGLang, a renamed symbol, or a hook that was not applied stops the start."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decided_args import decided_args
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from tiny_models import write_model

from tandemkv.cache_rank.protocol.errors import ContractError, SettingsError
from tandemkv.cache_rank.protocol.settings.placement import Link, Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.inference_rank.process import check_server_args, start
from tandemkv.inference_rank.sglang import contract as sglang_contract
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.pool import make_local_pool_class


def test_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.5.16")
    with pytest.raises(ContractError, match=r"0\.5\.16.*takes 0\.5\.17 to .*install sglang=="):
        sglang_contract.check_contract()


@pytest.mark.parametrize(
    ("symbol", "parameters", "named"),
    [
        ("json.no_such_function", (), r"lacks json\.no_such_function"),
        ("textwrap.dedent", ("no_such_parameter",), r"lacks no_such_parameter in textwrap\.dedent"),
    ],
)
def test_missing_symbols_are_named(
    monkeypatch: pytest.MonkeyPatch, symbol: str, parameters: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr(sglang_contract, "SYMBOLS", {symbol: parameters})
    with pytest.raises(ContractError, match=named):
        sglang_contract.check_contract()


def test_unapplied_hook_is_named() -> None:
    with pytest.raises(ContractError, match=r"sglang\.not\.hooked"):
        sglang_contract.check_hooks_applied(["sglang.not.hooked"])


@pytest.mark.parametrize("version", [sglang_versions.OLDEST, sglang_versions.NEWEST])
@pytest.mark.parametrize(
    "placement", [{}, {"two_gpus": True}, {"link": "local"}], ids=["shared", "two GPUs", "local"]
)
def test_every_hook_target_is_in_the_contract(
    monkeypatch: pytest.MonkeyPatch, placement: dict[str, object], version: str
) -> None:
    from tandemkv.inference_rank.sglang.hooks import scheduler_hooks

    settings = RankSettings.model_validate({"placement": placement})
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    number = sglang_versions.check_version(version)
    monkeypatch.setattr(sglang_versions, "_number", lambda: number)
    targets = {target for target, _, _ in scheduler_hooks("tandemkv")}
    assert targets <= set(sglang_contract.SYMBOLS | sglang_versions.symbols_of(number))


def test_sglang_is_told_that_models_read_text_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else it needs a processor of images, and sends an image to itself before it is ready."""
    from sglang.srt.configs.model_config import ModelConfig

    from tandemkv.inference_rank.sglang.hooks import scheduler_hooks

    write_model("qwen3.5", tmp_path)
    assert ModelConfig(str(tmp_path)).is_image_understandable_model
    monkeypatch.setenv(SETTINGS_VARIABLE, RankSettings().model_dump_json())
    hooks = {target: hook for target, hook, _ in scheduler_hooks("tandemkv")}
    before = hooks["sglang.srt.configs.model_config.ModelConfig.__init__"]
    (path,), kwargs = before(str(tmp_path), enable_multimodal=None)
    config = ModelConfig(path, **kwargs)
    assert not config.is_multimodal
    assert not config.is_image_understandable_model
    assert config.model_is_mrope


@pytest.mark.parametrize(
    "args",
    [
        {"enable_hierarchical_cache": True},
        {"disaggregation_mode": "prefill"},
        {"speculative_algorithm": "EAGLE"},
        {"enable_mixed_chunk": True},
        {"enable_two_batch_overlap": True},
        {"moe_a2a_backend": "deepep"},
        {"tp_size": 2},
        {"dp_size": 2},
        {"attn_cp_size": 2},
        {"dcp_size": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
    ],
)
def test_options_that_bypass_us_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(args)).replace("_", "-")):
        check_server_args(SimpleNamespace(**args), Placement(link="shared"), "auto")


@pytest.mark.parametrize(
    ("link", "all_exact", "algorithm"),
    [("shared", True, "NGRAM"), ("local", False, "NGRAM"), ("local", True, "EAGLE")],
)
def test_drafts_are_verified_densely_in_one_process(
    link: Link, all_exact: bool, algorithm: str
) -> None:
    plain = SimpleNamespace(speculative_algorithm="NGRAM")
    check_server_args(plain, Placement(link="local"), "auto", all_exact=True)
    args = SimpleNamespace(speculative_algorithm=algorithm)
    with pytest.raises(SettingsError, match="--speculative-algorithm: not supported"):
        check_server_args(args, Placement(link=link), "auto", all_exact=all_exact)


@pytest.mark.parametrize("windowed", [(), (0,), (2,), (0, 2), (1,)])
def test_sglangs_pool_may_have_layers_without_resident_sets(windowed: tuple[int, ...]) -> None:
    """Whichever they are: gpt-oss begins with a window, and ends with a full layer."""
    pool = make_local_pool_class(MHATokenToKVPool, 24, windowed)(
        size=64, page_size=1, dtype=torch.float32, head_num=2, head_dim=16, layer_num=3,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    wanted = [65 if layer in windowed else 89 for layer in range(3)]
    assert [len(x) for x in pool.k_buffer] == [len(x) for x in pool.v_buffer] == wanted
    assert (pool.size, pool.layer_num) == (64, 3)


def test_what_sglang_has_set_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, RankSettings().model_dump_json())
    args = decided_args(enable_mixed_chunk=True, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(SettingsError, match="--enable-mixed-chunk, --kv-cache-dtype: not supp"):
        start(SimpleNamespace(device="cpu", server_args=args), ())


def test_plain_options_are_accepted() -> None:
    plain = {"disaggregation_mode": "null", "kv_cache_dtype": "auto"}
    check_server_args(SimpleNamespace(tp_size=1, **plain), Placement(link="shared"), "auto")
    two = Placement(link="shared", tp_size=2)
    check_server_args(SimpleNamespace(tp_size=2, **plain), two, "auto")
    check_server_args(SimpleNamespace(tp_size=4, **plain), Placement(link="local"), "auto")
    args = SimpleNamespace(kv_cache_dtype="fp8_e4m3")
    check_server_args(args, Placement(link="shared"), "fp8_e4m3")
