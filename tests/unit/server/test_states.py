# SPDX-License-Identifier: Apache-2.0
"""What SGLang is told of the states of a model with linear attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from placement_world import SPEC, resolve
from placement_world import gpus as gpus
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.launch.sglang_command import sglang_argv
from tandemkv.server.plan.pages import PAGE_TOKENS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_with_linear_attention_is_served_in_one_process(
    tmp_path: Path, gpus: Any, device: str
) -> None:
    gpus(2)
    spec = msgspec.structs.replace(SPEC, linear_layers=(0, 1, 2))
    of_model: dict[str, Any] = {"spec": spec, "device": device}
    of_model["selection"] = {"budget_tokens": 2048}
    settings, said = resolve(tmp_path, **of_model)
    assert (settings.cache_ranks, settings.rank_settings.placement.link) == (0, "local")
    assert settings.tensor_parallel == {"cpu": 1, "cuda": 2}[device]
    if device == "cpu":
        assert "states of linear attention cannot be taken back" in said[0]
    count = str({"cpu": 3, "cuda": 5}[device] * settings.max_running_requests)
    argv = sglang_argv(settings, model_dir=tmp_path, device=device, dtype="bfloat16", port=1)
    assert argv[argv.index("--max-mamba-cache-size") + 1] == count
    pages = [argv[at + 1] for at, name in enumerate(argv) if name == "--page-size"]
    assert pages == {"cpu": ["1"], "cuda": ["64", "64"]}[device]
    for given in ({"cache_ranks": 1}, {"transport": "shared"}, {"transport": "message"}):
        with pytest.raises(SettingsError, match=r"linear attention.*--cache-ranks 0"):
            resolve(tmp_path, **of_model, **given)
    own = ("--max-mamba-cache-size", "7")
    for mine in ((*own, "--page-size", "64"), ("--disable-radix-cache",)):
        settings, _ = resolve(tmp_path, **of_model, sglang_args=mine)
        assert settings.sglang_args == mine
    if device == "cuda":
        assert PAGE_TOKENS == CHUNK_SIZE
        with pytest.raises(SettingsError, match=r"--page-size 128: states .* up to 64 tokens"):
            resolve(tmp_path, **of_model, sglang_args=("--page-size", "128"))


def test_sglang_is_told_how_to_keep_states_where_it_does_not_know(
    tmp_path: Path, gpus: Any
) -> None:
    """It has a list of architectures, and chooses for those in it by itself."""
    gpus(1)
    flag, name = "--mamba-radix-cache-strategy", "Qwen3_5ForCausalLM"
    of_both: dict[str, Any] = {"selection": {"budget_tokens": 2048}}
    known = msgspec.structs.replace(
        SPEC, linear_layers=(0, 1, 2), architecture="Qwen3_5ForConditionalGeneration"
    )
    spec = msgspec.structs.replace(known, architecture=name)
    settings, _ = resolve(tmp_path, **of_both, spec=spec)
    assert settings.sglang_args[-4:] == (flag, "extra_buffer", "--page-size", "64")
    for other, device in ((known, "cuda"), (spec, "cpu")):
        settings, _ = resolve(tmp_path, **of_both, spec=other, device=device)
        assert flag not in settings.sglang_args
    for named in (flag, "--mamba-scheduler-strategy"):
        own = (named, "extra_buffer_lazy")
        settings, _ = resolve(tmp_path, **of_both, spec=spec, sglang_args=own)
        assert settings.sglang_args[:2] == own
        assert settings.sglang_args.count(flag) == own.count(flag)
        for other, given in ((spec, "no_buffer"), (spec, "auto"), (known, "no_buffer")):
            with pytest.raises(SettingsError, match=f"{given}: without extra states of Qwen3_5"):
                resolve(tmp_path, **of_both, spec=other, sglang_args=(named, given))
        resolve(tmp_path, **of_both, spec=known, sglang_args=(named, "auto"))
    own = ("--linear-attn-backend", "flashinfer")
    with pytest.raises(SettingsError, match=r"flashinfer: extra states of .* by triton alone"):
        resolve(tmp_path, **of_both, spec=spec, sglang_args=own)
    for whole in (("--disable-radix-cache",), (*own, "--disable-radix-cache")):
        settings, _ = resolve(tmp_path, **of_both, spec=spec, sglang_args=whole)
        assert settings.sglang_args == whole
