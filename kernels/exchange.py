# SPDX-License-Identifier: Apache-2.0
"""Copying of token rows from the pools straight into the resident set."""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import (
    BOOL,
    FLOAT32,
    INT8,
    INT32,
    INTS,
    KV_FLOATS,
    Dims,
    check_int,
    fail,
)
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.samples import check_num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWeights:
    """Weights of samples that a copy of rows carries along; see `tandemkv.kernels.samples`."""

    source: torch.Tensor
    target: torch.Tensor
    """``[num_rows, num_kv_heads, num_samples]``, float32, dense in the last dimension; apart. The
    target is written, and may be another GPU's memory."""
    active: torch.Tensor
    """``[num_reqs]``, bool. Only rows of these requests are copied."""

    def check(self, dims: Dims) -> None:
        """Compare with the other arguments of `exchange_rows`, or raise `ValueError`."""
        for name, tensor in (("source", self.source), ("target", self.target)):
            dims.check(f"weights.{name}", tensor, "num_rows num_kv_heads num_samples", FLOAT32)
            if tensor.stride(-1) != 1:
                fail(f"weights.{name}.stride(-1)", tensor.stride(-1), "1")
        check_num_samples(dims["num_samples"])
        dims.check("weights.active", self.active, "num_reqs", BOOL)


def exchange_rows(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    fetch_slot: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    *,
    page_size: int = 1,
    weights: SampleWeights | None = None,
) -> None:
    """Copy the rows of the positions to fetch to their resident slots, bit by bit.

    Parameters
    ----------
    k_pool, v_pool : torch.Tensor
        ``[num_pool_slots, num_kv_heads, head_dim]``, float, float8_e4m3fn or int8.
    slots : torch.Tensor
        ``[num_reqs, max_pages]``, int32 or int64. Page table: position ``p`` is in slot
        ``slots[req, p // page_size] * page_size + p % page_size``.
    fetch_pos, fetch_slot : torch.Tensor
        ``[num_reqs, num_kv_heads, cap]``, int32, as `mirror_diff` returns them. Where
        either is negative nothing is copied. Slots are distinct within a head. On a GPU
        ranges are not checked.
    k_res, v_res : torch.Tensor
        ``[num_rows, num_slots, num_kv_heads, head_dim]``, dtype of the pools. Written.
    rows : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request; distinct, other than
        rows of requests that fetch nothing and are not active in `weights`.
    page_size : int
        Tokens per page, ``>= 1``. With 1, `slots` holds the slot of each position.
    weights : SampleWeights, optional
        Copied too, bit by bit, also where nothing is fetched.
    """
    check_int("page_size", page_size, minimum=1)
    dims = Dims()
    pool, res = "num_pool_slots num_kv_heads head_dim", "num_rows num_slots num_kv_heads head_dim"
    dims.check("k_pool", k_pool, pool, KV_FLOATS + INT8)
    dims.check("v_pool", v_pool, pool, KV_FLOATS + INT8)
    dims.check("slots", slots, "num_reqs max_pages", INTS)
    dims.check("fetch_pos", fetch_pos, "num_reqs num_kv_heads cap", INT32)
    dims.check("fetch_slot", fetch_slot, "num_reqs num_kv_heads cap", INT32)
    dims.check("k_res", k_res, res, (k_pool.dtype,))
    dims.check("v_res", v_res, res, (v_pool.dtype,))
    dims.check("rows", rows, "num_reqs", INTS)
    if weights is not None:
        weights.check(dims)
    if uses_triton(k_pool.device):
        from tandemkv.kernels.triton_ops.exchange import exchange_rows as on_gpu

        return on_gpu(
            k_pool, v_pool, slots, fetch_pos, fetch_slot, k_res, v_res, rows, page_size=page_size,
            weights=weights,
        )  # fmt: skip
    is_copied = (fetch_pos >= 0) & (fetch_slot >= 0)
    if weights is not None:
        chosen = rows.long()[weights.active]
        weights.target[chosen] = weights.source[chosen]
    if not bool(is_copied.any()):
        return
    req, head, place = torch.nonzero(is_copied, as_tuple=True)
    to = fetch_slot[req, head, place].long()
    source = _slot_of(slots, fetch_pos, page_size)[req, head, place]
    row = rows.long()[req]
    k_res[row, to, head] = k_pool[source, head]
    v_res[row, to, head] = v_pool[source, head]


def _slot_of(slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of positions ``[num_reqs, num_kv_heads, n]``, int64; of padding, any."""
    places = positions.clamp(min=0).long()
    page = slots.gather(1, (places // page_size).view(slots.shape[0], -1)).long()
    return page.view_as(places) * page_size + places % page_size
