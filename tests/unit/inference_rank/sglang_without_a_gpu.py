# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of SGLang that need a GPU, or AMX on a CPU, or fail without it.

Each does what the kernel that it stands in for says that it does, and stands in for it in stock
runs and in ours. One is part of attention, in stock runs only: on such a CPU SGLang has no backend
that takes gpt-oss's sinks.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe import topk
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models import qwen2_moe
from sglang.srt.models.minimax_m2 import MiniMaxM2QKRMSNorm
from tiny_models import attend_by_definition

from tandemkv.inference_rank.sglang import versions as sglang_versions

_fused_topk = topk.fused_topk_native


def install() -> None:
    """Put them in SGLang's modules."""
    MiniMaxM2QKRMSNorm._forward_naive = _norm_of_minimax
    qwen2_moe.fused_gate_sigmoid_mul_add = _gate_of_shared_experts
    topk.fused_topk_native = _topk_of_ernie
    for name in ("forward_extend", "forward_decode"):
        forward = getattr(TorchNativeAttnBackend, name)
        setattr(TorchNativeAttnBackend, name, _with_sinks(forward, name == "forward_decode"))
    _take_sinks_for_granted()


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


def _with_sinks(forward: Callable[..., torch.Tensor], is_decode: bool) -> Any:
    """Return SGLang's method for layers without sinks, and the definition for those with."""

    def attend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if sinks is None:
            return forward(self, q, k, v, layer, batch, save_kv_cache)
        assert save_kv_cache
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        counts = [1] * len(batch.seq_lens) if is_decode else batch.extend_seq_lens.tolist()
        queries = q.view(len(q), -1, layer.head_dim).split(counts)
        found = []
        for i, query in enumerate(queries):
            row, length = batch.req_pool_indices[i], int(batch.seq_lens[i])
            slots = self.req_to_token_pool.req_to_token[row, :length]
            window = None if layer.sliding_window_size < 0 else layer.sliding_window_size
            found.append(
                attend_by_definition(
                    query, keys[slots], values[slots], sinks, scale=layer.scaling, window=window
                )
            )
        return torch.cat(found).flatten(1)

    return attend


def _take_sinks_for_granted() -> None:
    """Let gpt-oss run with ``torch_native``, which takes sinks here."""
    path, _, name = sglang_versions.adjustments().rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, name)

    @functools.wraps(original)
    def adjust(args: Any) -> None:
        with sglang_versions.taken_for(args, "torch_native", "triton"):
            original(args)

    setattr(owner, name, adjust)
