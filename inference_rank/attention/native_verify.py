# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``torch_native`` backend with steps that verify drafts, which it does not take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from tandemkv.kernels.paging import rows_at


class NativeVerify(TorchNativeAttnBackend):
    """Attention over the pool in which a draft also attends to those that it continues.

    Drafts are stored before they are attended to. Their slots follow the request's in the table.
    """

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Attend from each prompt's new tokens, or from each request's drafts."""
        if not forward_batch.forward_mode.is_target_verify():
            out: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        pool, table = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
        if save_kv_cache:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            pool.set_kv_buffer(layer, location, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        drafts = forward_batch.spec_info
        count = int(drafts.draft_token_num)
        masks = drafts.custom_mask.view(-1, count, count).bool()
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim).split(count)
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        found = []
        for query, mask, row, length in zip(queries, masks, rows, lengths, strict=True):
            slots = table[row, : length + count]
            own_k, own_v = (rows_at(stored, slots) for stored in (keys, values))
            found.append(attend_to_tree(query, own_k, own_v, mask, scale=layer.scaling))
        return torch.cat(found).flatten(1)


def attend_to_tree(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor,
    *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return attention of the last m of n tokens ``[m, Hq, D]``, which are a tree.

    Parameters
    ----------
    query : torch.Tensor
        ``[m, Hq, D]``, of the nodes.
    keys, values : torch.Tensor
        ``[n, H, D]``, of all; every node attends to the first n - m.
    mask : torch.Tensor
        ``[m, m]``, bool: whether a node attends to another, itself included.
    scale : float
        Factor of the logits.
    """
    allowed = F.pad(mask, (len(keys) - len(query), 0), value=True)
    q, k, v = (x.to(query.dtype).transpose(0, 1)[None] for x in (query, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
