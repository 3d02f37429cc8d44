# SPDX-License-Identifier: Apache-2.0
"""Scattering of a pack into the resident set; called by the inference rank."""

import torch

from tandemkv.kernels.check import FLOATS, INT8, INT32, INTS, Dims, fail
from tandemkv.kernels.dispatch import resolve


def scatter_pack(
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    fetch_slot: torch.Tensor,
    k_in: torch.Tensor,
    v_in: torch.Tensor,
    *,
    pos_res: torch.Tensor | None = None,
    fetch_pos: torch.Tensor | None = None,
) -> None:
    """Write the rows of a pack to their resident slots, bit by bit.

    Parameters
    ----------
    k_res, v_res : torch.Tensor
        ``[num_rows, num_slots, num_kv_heads, head_dim]``, float or int8.
        Written.
    rows : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request; distinct, other
        than rows whose slots are all padding.
    fetch_slot : torch.Tensor
        ``[num_reqs, num_kv_heads, cap]``, int32. Resident slots, distinct
        within a head; negative is padding and ignored. The range is not
        checked on a GPU.
    k_in, v_in : torch.Tensor
        ``[num_reqs, num_kv_heads, cap, head_dim]``, dtype of the resident set.
    pos_res : torch.Tensor, optional
        ``[num_rows, num_kv_heads, num_slots]``, int32. Written: the position
        that each slot holds.
    fetch_pos : torch.Tensor, optional
        ``[num_reqs, num_kv_heads, cap]``, int32. Given with `pos_res`.

    Raises
    ------
    ValueError
        If a shape, dtype or device differs from the above, or only one of
        `pos_res` and `fetch_pos` is given.
    IndexError
        On CPU, if a row or a slot is out of range.
    """
    dims = Dims()
    layout, pack_layout = "num_rows num_slots num_kv_heads head_dim", "num_reqs num_kv_heads cap"
    dims.check("k_res", k_res, layout, FLOATS + INT8)
    dims.check("v_res", v_res, layout, FLOATS + INT8)
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("fetch_slot", fetch_slot, pack_layout, INT32)
    dims.check("k_in", k_in, f"{pack_layout} head_dim", (k_res.dtype,))
    dims.check("v_in", v_in, f"{pack_layout} head_dim", (v_res.dtype,))
    if pos_res is not None and fetch_pos is not None:
        dims.check("pos_res", pos_res, "num_rows num_kv_heads num_slots", INT32)
        dims.check("fetch_pos", fetch_pos, pack_layout, INT32)
    elif pos_res is not None or fetch_pos is not None:
        fail("pos_res", pos_res if pos_res is None else "given", "given exactly with fetch_pos")
    run = resolve("scatter", "scatter_pack", k_res.device)
    run(k_res, v_res, rows, fetch_slot, k_in, v_in, pos_res=pos_res, fetch_pos=fetch_pos)
