# SPDX-License-Identifier: Apache-2.0
"""Decode attention with log-sum-exp over a paged pool.

`tandemkv.kernels.merge` joins parts of one attention.
"""

import torch

from tandemkv.kernels.check import FLOATS, INTS, KV_FLOATS, Dims, fail
from tandemkv.kernels.dispatch import resolve


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
        ``[num_reqs]``, int32 or int64, ``0 <= hi <= max_pages * page_size``.
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

    Raises
    ------
    ValueError
        On CPU also if `hi` or a slot below it is out of bounds.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check("v_pool", v_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    dims.check("slots", slots, "num_reqs max_pages", INTS)
    dims.check("hi", hi, "num_reqs", INTS)
    if page_size < 1:
        fail("page_size", page_size, ">= 1")
    run = resolve("attention", "attend_paged", q.device)
    result: tuple[torch.Tensor, torch.Tensor] = run(
        q, k_pool, v_pool, slots, hi, scale=scale, page_size=page_size
    )
    return result
