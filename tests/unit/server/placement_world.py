# SPDX-License-Identifier: Apache-2.0
"""Settings of Qwen3-8B's shape, resolved on GPUs that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.plan.placement_choice import resolve_placement
from tandemkv.server.settings.launch_settings import ServeSettings

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    num_layers=36,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    max_context=131072,
    dtype="bfloat16",
    model_hash="0",
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that there are some GPUs of 139 GiB, with peer access unless told otherwise."""
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)

    def pretend(count: int, gib: int = 139, *, peers: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peers)
        memory = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: memory)

    return pretend


def resolve(
    tmp_path: Path, device: str = "cuda", *, spec: ModelSpec = SPEC, **changes: Any
) -> tuple[ServeSettings, list[str]]:
    """Resolve settings for 8 requests that share 512K tokens."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given: dict[str, Any] = {
        "model": str(tmp_path),
        "cache": {"capacity_tokens": 8 * 65536},
        "selection": {"budget_tokens": 2048, "index_dtype": "int4", "exact_layers": []},
    }
    settings = ServeSettings.model_validate(given | changes)
    said: list[str] = []
    resolved = resolve_placement(settings, spec, tmp_path, device=device, progress=said.append)
    return resolved, said
