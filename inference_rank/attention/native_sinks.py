# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``torch_native`` backend for models with attention sinks, which it does not take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from tandemkv.kernels.paging import rows_at


class NativeSinks(TorchNativeAttnBackend):
    """Causal attention over the pool, with a window where a layer has one, and with sinks.

    A sink is one more key: its logit is the sink's in each row, and its value is zero.
    """

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from the new tokens of each prompt to all before them."""
        counts = forward_batch.extend_seq_lens.tolist()
        return self._attend(q, k, v, layer, forward_batch, counts, save_kv_cache, sinks)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from the newest token of each request."""
        counts = [1] * len(forward_batch.seq_lens)
        return self._attend(q, k, v, layer, forward_batch, counts, save_kv_cache, sinks)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        counts: list[int], save_kv_cache: bool, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``[n, Hq * D]`` for the last `counts` tokens of each request."""
        pool, window = self.token_to_kv_pool, int(layer.sliding_window_size)
        if save_kv_cache:
            shape = (-1, layer.tp_k_head_num, layer.head_dim)
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            pool.set_kv_buffer(layer, location, k.view(shape), v.view(shape))
        keys, values = pool.get_kv_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim).split(counts)
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        found = []
        for query, row, length in zip(queries, rows, lengths, strict=True):
            k, v = (rows_at(stored, table[row, :length]) for stored in (keys, values))
            found.append(attend_with_sinks(query, k, v, sinks, scale=layer.scaling, window=window))
        return torch.cat(found).flatten(1)


def attend_with_sinks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None,
    *, scale: float, window: int,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention of the last m of n tokens ``[m, Hq, D]``.

    Parameters
    ----------
    query : torch.Tensor
        ``[m, Hq, D]``, of the last tokens.
    keys, values : torch.Tensor
        ``[n, H, D]``, of all.
    sinks : torch.Tensor, optional
        ``[Hq]``: the logit of each head's sink.
    scale : float
        Factor of the logits.
    window : int
        Tokens before its own that a token attends to; below 0: all.
    """
    m, n = len(query), len(keys)
    own = torch.arange(n - m, n)[:, None]
    behind = own - torch.arange(n)
    allowed = (behind >= 0) & (behind <= window) if window >= 0 else behind >= 0
    mask = torch.zeros((query.shape[1], m, n + 1), dtype=query.dtype)
    mask[..., :n].masked_fill_(~allowed, float("-inf"))
    mask[..., n] = float("-inf") if sinks is None else sinks.to(query.dtype)[:, None]
    q, k, v = (x.to(query.dtype).transpose(0, 1)[None] for x in (query, keys, values))
    # The sink's key and value.
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask[None], scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
