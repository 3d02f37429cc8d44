# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.attention`, on a CPU: one request at a time, in float32."""

import torch

from tandemkv.kernels.check import fail
from tandemkv.kernels.reference.paging import rows_at, segments, slots_of


def _attend_slots(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with ``q`` ``[num_qo_heads, head_dim]`` to the given slots of a pool."""
    grouped = q.float().reshape(k_pool.shape[1], -1, q.shape[1])  # [H, G, D]
    parts = [
        _attend_rows(grouped, rows_at(k_pool, index), rows_at(v_pool, index), scale)
        for _, _, index in segments(slots, k_pool.shape[0])
    ]
    out, lse = parts[0]
    if len(parts) > 1:
        lses = torch.stack([part for _, part in parts])
        lse = torch.logsumexp(lses, dim=0)
        outs = torch.stack([part for part, _ in parts])
        out = (outs * torch.softmax(lses, dim=0).unsqueeze(-1)).sum(dim=0)
    return out.reshape(q.shape), lse.reshape(-1)


def _attend_rows(
    grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with ``[H, G, D]`` to ``[n, H, D]``; returns ``[H, G, D]`` and ``[H, G]``.

    The query heads of a KV head are passed as its tokens, so that no key is repeated for them.
    PyTorch's public function has no log-sum-exp.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped[None],
        keys.float().transpose(0, 1)[None],
        values.float().transpose(0, 1)[None],
        scale=scale,
    )
    return out[0], lse[0]


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
