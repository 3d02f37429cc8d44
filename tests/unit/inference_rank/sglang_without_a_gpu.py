# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of SGLang 0.5.17 that need a GPU, or AMX on a CPU, or fail without it.

None is part of attention. Each does what the kernel that it stands in for says that it does, and
stands in for it in stock runs and in ours.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe import topk
from sglang.srt.models import qwen2_moe
from sglang.srt.models.minimax_m2 import MiniMaxM2QKRMSNorm

_fused_topk = topk.fused_topk_native


def install() -> None:
    """Put them in SGLang's modules."""
    MiniMaxM2QKRMSNorm._forward_naive = _norm_of_minimax
    qwen2_moe.fused_gate_sigmoid_mul_add = _gate_of_shared_experts
    topk.fused_topk_native = _topk_of_ernie


def _norm_of_minimax(self: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    """Call SGLang's own modules, which are the kernel's definition."""
    return self._q_norm(q), self._k_norm(k)


def _gate_of_shared_experts(
    hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """Add shared experts to the others, as a Triton kernel does."""
    out += torch.sigmoid(hidden @ gate)[:, None] * shared


def _topk_of_ernie(*args: Any, correction_bias: torch.Tensor | None = None, **options: Any) -> Any:
    """Take ERNIE's bias ``[1, experts]`` for what other models have, ``[experts]``."""
    if correction_bias is not None:
        correction_bias = correction_bias.flatten()
    return _fused_topk(*args, correction_bias=correction_bias, **options)
