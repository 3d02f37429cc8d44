# SPDX-License-Identifier: Apache-2.0
"""Decode attention with log-sum-exp over a paged pool.

`tandemkv.kernels.merge` joins parts of one attention.
"""

import torch

from tandemkv.kernels.check import FLOATS, INTS, KV_FLOATS, Dims, check_int, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.paging import rows_at, segments, slots_of


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
    """Attend to the logical positions ``[0, hi)`` of each request.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    k_pool, v_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float or float8_e4m3fn.
    slots : torch.Tensor
        ``[num_reqs, max_pages]``, int32 or int64. Page that each run of `page_size` logical
        positions lies in, hence their slots if that is 1; only what holds ``[0, hi)`` is read.
    hi : torch.Tensor
        ``[num_reqs]``, int32 or int64, ``0 <= hi <= max_pages * page_size``. Checked on a CPU, as
        are the slots below.
    scale : float
        Factor of the logits, usually ``head_dim ** -0.5``.
    page_size : int
        Positions that lie in consecutive slots, from a multiple of it on.

    Returns
    -------
    out : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float32; 0 where there is nothing to attend to.
    lse : torch.Tensor
        ``[num_reqs, num_qo_heads]``, float32. Natural logarithm of the sum of the exponentials of
        the scaled logits; ``-inf`` where there is nothing to attend to.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check("v_pool", v_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    dims.check("slots", slots, "num_reqs max_pages", INTS)
    dims.check("hi", hi, "num_reqs", INTS)
    check_int("page_size", page_size, minimum=1)
    if uses_triton(q.device):
        from tandemkv.kernels.triton_ops.attention import attend_paged as on_gpu

        return on_gpu(q, k_pool, v_pool, slots, hi, scale=scale, page_size=page_size)
    out = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse = out.new_full(q.shape[:2], float("-inf"))
    max_len = slots.shape[1] * page_size
    for req, end in enumerate(hi.tolist()):
        if end < 0 or end > max_len:
            fail(f"hi[{req}]", end, f">= 0 and <= max_len={max_len}")
        if end:
            where = slots_of(slots[req], 0, end, page_size)
            out[req], lse[req] = _attend_slots(q[req], k_pool, v_pool, where, scale)
    return out, lse


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
