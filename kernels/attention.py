# SPDX-License-Identifier: Apache-2.0
"""Decode attention with log-sum-exp, over resident slots and over a paged pool.

`attend_resident` is the inference rank's, `attend_paged` the cache rank's exact
step; `tandemkv.kernels.merge` joins parts of one attention.
"""

import torch

from tandemkv.kernels.check import BOOL, FLOATS, INTS, Dims, fail
from tandemkv.kernels.dispatch import resolve


def attend_resident(
    q: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the visible resident slots of each request's row.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    k_res, v_res : torch.Tensor
        ``[num_rows, num_slots, num_kv_heads, head_dim]``, float. What stands in
        slots that are not visible has no influence, NaN included.
    rows : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request.
    visible : torch.Tensor
        ``[num_reqs, num_slots]``, bool, the same for all heads.
    scale : float
        Factor of the logits, usually ``head_dim ** -0.5``.

    Returns
    -------
    out : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float32; 0 where nothing is
        visible.
    lse : torch.Tensor
        ``[num_reqs, num_qo_heads]``, float32. Natural logarithm of the sum of
        the exponentials of the scaled logits; ``-inf`` where nothing is visible.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_res", k_res, "num_rows num_slots num_kv_heads head_dim", FLOATS)
    dims.check("v_res", v_res, "num_rows num_slots num_kv_heads head_dim", FLOATS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("visible", visible, "num_reqs num_slots", BOOL)
    run = resolve("attention", "attend_resident", q.device)
    result: tuple[torch.Tensor, torch.Tensor] = run(q, k_res, v_res, rows, visible, scale=scale)
    return result


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
    q, scale
        As in `attend_resident`.
    k_pool, v_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float.
    slots : torch.Tensor
        ``[num_reqs, max_pages]``, int32 or int64. Page that each run of `page_size` logical
        positions lies in, hence their slots if that is 1; only what holds ``[0, hi)`` is read.
    hi : torch.Tensor
        ``[num_reqs]``, int32 or int64, ``0 <= hi <= max_pages * page_size``.
    page_size : int
        Positions that lie in consecutive slots, from a multiple of it on.

    Returns
    -------
    out, lse : torch.Tensor
        As in `attend_resident`.

    Raises
    ------
    ValueError
        On CPU also if `hi` or a slot below it is out of bounds.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", FLOATS)
    dims.check("v_pool", v_pool, "num_slots num_kv_heads head_dim", FLOATS)
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
