# SPDX-License-Identifier: Apache-2.0
"""What the selection kernels work in on a GPU: made once an epoch, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandemkv.kernels.mirror import MirrorScratch, make_mirror_scratch
from tandemkv.kernels.score import ScoreScratch, make_score_scratch

from .protocol.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers of `score_keys` (all KV heads at once) and of `mirror_diff`."""

    score: ScoreScratch
    mirror: MirrorScratch


def make_scratch(model: ModelSpec, max_rows: int, device: torch.device) -> Scratch | None:
    """Allocate for `max_rows` requests of any length; None on a CPU, which needs none."""
    if device.type == "cpu":
        return None
    heads, context = model.num_kv_heads, model.max_context
    return Scratch(
        make_score_scratch(max_rows, model.num_qo_heads, heads, context, device),
        make_mirror_scratch(max_rows, heads, context, device),
    )
