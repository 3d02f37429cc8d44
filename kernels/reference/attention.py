# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.attention`: one request at a time, in float32."""

import torch

from tandemkv.kernels.check import fail
from tandemkv.kernels.reference.paging import key_logits, segments, slots_of


def _attend_slots(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with ``q`` ``[num_qo_heads, head_dim]`` to the given slots of a pool."""
    num_qo_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    grouped = (q.float() * scale).reshape(num_kv_heads, -1, head_dim)
    logits = key_logits(grouped, k_pool, slots)  # [H, G, n]
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    probs = logits.sub_(lse).exp_()
    out = torch.zeros_like(grouped)
    for start, end, index in segments(slots, v_pool.shape[0]):
        out += torch.bmm(probs[..., start:end], v_pool[index].float().transpose(0, 1))
    return out.view(num_qo_heads, head_dim), lse.view(num_qo_heads)


def _allocate(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    return out, out.new_full(q.shape[:2], float("-inf"))


def attend_paged(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    hi: torch.Tensor,
    *,
    scale: float,
    page_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to positions; see `tandemkv.kernels.attention.attend_paged`."""
    out, lse = _allocate(q)
    max_len = slots.shape[1] * page_size
    for req, end in enumerate(hi.tolist()):
        if end < 0 or end > max_len:
            fail(f"hi[{req}]", end, f">= 0 and <= max_len={max_len}")
        if end:
            where = slots_of(slots[req], 0, end, page_size)
            out[req], lse[req] = _attend_slots(q[req], k_pool, v_pool, where, scale)
    return out, lse
