# SPDX-License-Identifier: Apache-2.0
"""Gathering of token rows from the pools into a pack; called by the cache rank."""

import torch

from tandemkv.kernels.check import FLOATS, INT8, INT32, INTS, Dims, check_int
from tandemkv.kernels.dispatch import resolve


def gather_pack(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    page_size: int = 1,
) -> None:
    """Copy the rows of the positions to fetch, per KV head, bit by bit.

    Parameters
    ----------
    k_pool, v_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float or int8.
    slots : torch.Tensor
        ``[num_reqs, max_pages]``, int32 or int64. Page table: position ``p`` is in slot
        ``slots[req, p // page_size] * page_size + p % page_size``.
    fetch_pos : torch.Tensor
        ``[num_reqs, num_kv_heads, cap]``, int32. Logical positions; negative is
        padding, anywhere. The range is not checked.
    k_out, v_out : torch.Tensor
        ``[num_reqs, num_kv_heads, cap, head_dim]``, dtype of the pool. Written;
        rows of padding are zeroed.
    page_size : int
        Tokens per page, ``>= 1``. With 1, `slots` holds the slot of each position.
    """
    check_int("page_size", page_size, minimum=1)
    dims = Dims()
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", FLOATS + INT8)
    dims.check("v_pool", v_pool, "num_slots num_kv_heads head_dim", FLOATS + INT8)
    dims.check("slots", slots, "num_reqs max_pages", INTS)
    dims.check("fetch_pos", fetch_pos, "num_reqs num_kv_heads cap", INT32)
    dims.check("k_out", k_out, "num_reqs num_kv_heads cap head_dim", (k_pool.dtype,))
    dims.check("v_out", v_out, "num_reqs num_kv_heads cap head_dim", (v_pool.dtype,))
    run = resolve("pack", "gather_pack", k_pool.device)
    run(k_pool, v_pool, slots, fetch_pos, k_out, v_out, page_size=page_size)
