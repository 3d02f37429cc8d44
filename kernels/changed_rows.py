# SPDX-License-Identifier: Apache-2.0
"""Rows of resident sets that the other end of a link has not got: in a buffer, and out of it.

What differs is found by comparing the engine's books with what they were when rows went last, so it
does not matter which kernel has brought a row. The buffer is of fixed size, and a link can carry it
without knowing how much of it is used.
"""

import torch

from tandemkv.kernels.check import BOOL, INT8, INT32, INTS, KV_FLOATS, Dims
from tandemkv.kernels.dispatch import uses_triton

_SETS = "num_rows num_slots num_kv_heads head_dim"
_BUFFER = "num_reqs num_kv_heads cap head_dim"


def take_changed_rows(
    positions: torch.Tensor,
    sent: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    active: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Copy what differs between `positions` and `sent` to the buffer, and note that it was.

    Parameters
    ----------
    positions : torch.Tensor
        ``[num_rows, num_kv_heads, num_slots]``, int32. Position in each resident slot.
    sent : torch.Tensor
        As `positions`: what it was when the slot was taken last. Updated in place for what is
        taken.
    k_res, v_res : torch.Tensor
        ``[num_rows, num_slots, num_kv_heads, head_dim]``, float, float8_e4m3fn or int8.
    rows : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request; distinct where `active`.
    active : torch.Tensor
        ``[num_reqs]``, bool. Nothing of other requests is taken.
    slots : torch.Tensor
        ``[num_reqs, num_kv_heads, cap]``, int32. Written: the slots that differ in rising order,
        then -1. If more than `cap` do, the others stay as they are for a later call.
    k, v : torch.Tensor
        ``[num_reqs, num_kv_heads, cap, head_dim]``, dtype of the sets, dense. Written where `slots`
        names one.
    """
    dims = Dims()
    dims.check("positions", positions, "num_rows num_kv_heads num_slots", INT32)
    dims.check("sent", sent, "num_rows num_kv_heads num_slots", INT32)
    _check(dims, k_res, v_res, rows, slots, k, v)
    dims.check("active", active, "num_reqs", BOOL)
    if uses_triton(k_res.device):
        from tandemkv.kernels.triton_ops.changed_rows import take_changed_rows as on_gpu

        return on_gpu(positions, sent, k_res, v_res, rows, active, slots, k, v)
    index = rows.long()
    now = positions[index]
    differs = (now != sent[index]) & active[:, None, None]
    place = differs.cumsum(-1) - 1
    req, head, slot = (differs & (place < slots.shape[2])).nonzero(as_tuple=True)
    to = place[req, head, slot]
    slots.fill_(-1)
    slots[req, head, to] = slot.int()
    for out, sets in ((k, k_res), (v, v_res)):
        out[req, head, to] = sets[index[req], slot, head]
    sent[index[req], head, slot] = now[req, head, slot]


def put_changed_rows(
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
) -> None:
    """Copy what `take_changed_rows` has taken to the same slots of other resident sets.

    Parameters
    ----------
    slots, k, v, rows
        As there; slots are distinct within a head.
    k_res, v_res : torch.Tensor
        As there. Written.
    """
    _check(Dims(), k_res, v_res, rows, slots, k, v)
    if uses_triton(k_res.device):
        from tandemkv.kernels.triton_ops.changed_rows import put_changed_rows as on_gpu

        return on_gpu(slots, k, v, rows, k_res, v_res)
    req, head, place = (slots >= 0).nonzero(as_tuple=True)
    slot, row = slots[req, head, place].long(), rows.long()[req]
    for sets, found in ((k_res, k), (v_res, v)):
        sets[row, slot, head] = found[req, head, place]


def _check(
    dims: Dims, k_res: torch.Tensor, v_res: torch.Tensor, rows: torch.Tensor,
    slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
) -> None:  # fmt: skip
    dims.check("k_res", k_res, _SETS, KV_FLOATS + INT8)
    dims.check("v_res", v_res, _SETS, (k_res.dtype,))
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("slots", slots, "num_reqs num_kv_heads cap", INT32)
    dims.check("k", k, _BUFFER, (k_res.dtype,))
    dims.check("v", v, _BUFFER, (k_res.dtype,))
