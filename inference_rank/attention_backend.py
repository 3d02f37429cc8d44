# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend ``tandemkv``: turns its calls into prefill and decode steps.

When the cache rank is lost, the forward pass that is under way ends with zeros instead of an
exception (which would end the whole server); `recovery` then ends or recomputes its requests
before any of its tokens is sent.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from tandemkv.cache_rank.protocol.errors import CacheRankError

from . import recovery
from . import runtime as runtime_module
from .decode_step import DecodeStep
from .extend_step import ExtendBatch, ExtendStep
from .residual_hooks import install_residual_hooks

_LOG = logging.getLogger(__name__)


class TandemKVAttentionBackend(AttentionBackend):
    """Attention over the resident set, with the cache rank behind it."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runtime = runtime_module.create(runner)
        self._step: ExtendStep | DecodeStep | None = None
        self._last_layer = self._runtime.model.num_layers - 1
        install_residual_hooks(runner.model, self._on_layer_input)

    def support_triton(self) -> bool:
        """No Triton metadata is needed from SGLang."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding rows."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Announce the step to the cache rank."""
        self._step = None
        mode = forward_batch.forward_mode
        packs = self._runtime.packs
        if mode.is_idle() or packs is None or self._runtime.client.lost_reason is not None:
            return
        rows = forward_batch.req_pool_indices.tolist()
        lengths = [int(n) for n in forward_batch.seq_lens_cpu.tolist()]
        try:
            if mode.is_decode():
                tokens = None
                if self._runtime.refresh.wants_tokens:
                    tokens = forward_batch.input_ids.tolist()
                self._step = DecodeStep(self._runtime, packs, rows, lengths, tokens)
            else:
                prefix_lens = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
                self._step = ExtendStep(self._runtime, ExtendBatch(rows, prefix_lens, lengths))
        except CacheRankError as error:
            self._lose(error)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Prefill attention of one layer."""
        return self._attend(q, k, v, layer)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Decode attention of one layer."""
        return self._attend(q, k, v, layer)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
        q = q.reshape(-1, heads, dim)
        k, v = k.reshape(-1, kv_heads, dim), v.reshape(-1, kv_heads, dim)
        step = self._step
        if step is None:
            return torch.zeros_like(q).reshape(-1, heads * dim)
        try:
            out = step.attend(layer.layer_id, q, k, v)
            if layer.layer_id == self._last_layer:
                step.finish()
                self._step = None
        except CacheRankError as error:
            self._lose(error)
            out = torch.zeros_like(q)
        return out.reshape(-1, heads * dim)

    def _on_layer_input(
        self, layer: int, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        step = self._step
        if not isinstance(step, DecodeStep) or not step.wants_layer_input:
            return
        stream = hidden_states if residual is None else hidden_states + residual
        try:
            step.on_layer_input(layer, stream)
        except CacheRankError as error:
            self._lose(error)

    def _lose(self, error: CacheRankError) -> None:
        self._step = None
        _LOG.error("cache rank lost: %s", error)
        self._runtime.client.mark_lost(f"{type(error).__name__}: {error}")
        recovery.tell_clients(self._runtime)
