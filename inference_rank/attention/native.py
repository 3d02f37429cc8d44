# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``torch_native`` backend with what it does not take: attention sinks, and drafts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from tandemkv.inference_rank.sglang.pool import store_tokens
from tandemkv.kernels.paging import rows_at


class NativeAttention(TorchNativeAttnBackend):
    """Attention over the pool on a CPU.

    A sink is one more key: its logit is the sink's in each row, and its value is zero. Drafts are
    stored before they are attended to, and their slots follow the request's in the table; a draft
    also attends to those that it continues.
    """

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from each prompt's new tokens, or from each request's drafts."""
        lengths = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_target_verify():
            drafts = forward_batch.spec_info
            count = int(drafts.draft_token_num)
            trees = drafts.custom_mask.view(-1, count, count).bool()
            masks = [
                F.pad(tree, (length, 0), value=True)
                for tree, length in zip(trees, lengths, strict=True)
            ]
        elif sinks is None:
            out: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        else:
            counts, window = forward_batch.extend_seq_lens.tolist(), int(layer.sliding_window_size)
            masks = [causal(m, n, window) for m, n in zip(counts, lengths, strict=True)]
        return self._attend(q, k, v, layer, forward_batch, masks, save_kv_cache, sinks)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from the newest token of each request."""
        if sinks is None:
            out: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        window = int(layer.sliding_window_size)
        masks = [causal(1, length, window) for length in forward_batch.seq_lens.tolist()]
        return self._attend(q, k, v, layer, forward_batch, masks, save_kv_cache, sinks)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        masks: list[torch.Tensor], save_kv_cache: bool, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``[all m, Hq * D]``; `masks` ``[m, n]`` of the last m of n tokens of requests."""
        pool, table = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
        if save_kv_cache:
            store_tokens(pool, layer, forward_batch, k, v)
        stored = pool.get_kv_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim).split([len(m) for m in masks])
        rows, found = forward_batch.req_pool_indices.tolist(), []
        for query, row, mask in zip(queries, rows, masks, strict=True):
            k, v = (rows_at(each, table[row, : mask.shape[1]]) for each in stored)
            found.append(attend_where(query, k, v, mask, sinks, scale=layer.scaling))
        return torch.cat(found).flatten(1)


def causal(m: int, n: int, window: int) -> torch.Tensor:
    """Return what the last `m` of `n` tokens attend to, ``[m, n]`` bool.

    `window` is the number of tokens before its own that a token attends to; below 0: all.
    """
    behind = torch.arange(n - m, n)[:, None] - torch.arange(n)
    return (behind >= 0) & (behind <= window) if window >= 0 else behind >= 0


def attend_where(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor,
    sinks: torch.Tensor | None = None, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return attention of ``query [m, Hq, D]`` to ``keys, values [n, H, D]``, like `query`.

    ``allowed [m, n]`` bool says what a query attends to; ``sinks [Hq]`` are logits of each head's
    sink.
    """
    q, k, v = (x.to(query.dtype).transpose(0, 1)[None] for x in (query, keys, values))
    mask = allowed
    if sinks is not None:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))  # the sink's key and value
        mask = sinks.to(query.dtype)[None, :, None, None].repeat(1, 1, len(query), len(keys) + 1)
        mask[..., :-1] = torch.where(allowed, 0.0, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
