# SPDX-License-Identifier: Apache-2.0
"""SGLang's LoRA in torch (``--lora-backend torch_native``) on a CPU, and a random adapter.

SGLang 0.5.17 keeps some small tensors in pinned memory, which torch has with a GPU only; without
one they are kept in memory that is not pinned. All that is computed is SGLang's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend
from sglang.srt.lora.lora_registry import LoRARef

NAME, RANK = "polite", 4
_TARGETS = ("q_proj", "v_proj", "o_proj")


class _Unpinned:
    """The module torch, whose new tensors are never pinned."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty", "arange"):
            return found

        def make(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            del pin_memory
            made: torch.Tensor = found(*args, **options)
            return made

        return make


def install() -> None:
    """Let SGLang's modules do without pinned memory."""
    for module in (layers, torch_backend):
        module.torch = _Unpinned()
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]


def write_adapter(model: Path, folder: Path) -> None:
    """Write an adapter for a model with q, k and v apart, as PEFT saves it; always the same."""
    torch.manual_seed(11)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in _TARGETS:
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK,
        "target_modules": list(_TARGETS), "bias": "none", "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def arguments(folder: Path) -> dict[str, Any]:
    """Return SGLang's arguments that load the adapter, as its checks leave them."""
    adapter = LoRARef(lora_id=NAME, lora_name=NAME, lora_path=str(folder), pinned=False)
    return {
        "enable_lora": True, "lora_paths": [adapter], "lora_backend": "torch_native",
        "max_loras_per_batch": 2,
    }  # fmt: skip
