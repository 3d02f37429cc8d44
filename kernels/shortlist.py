# SPDX-License-Identifier: Apache-2.0
"""Choice among tokens that a scan of all keys has put on a list.

The scan can use a rougher query than the choice, and run earlier: what it has to get right is
which tokens are among the best few thousand, not which of them are the best. LFPS, too, takes
exact scores of candidates alone; its candidates come from past attention.
"""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import FLOAT32, FLOATS, INT32, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import resolve
from tandemkv.kernels.score import POOLINGS, padded_group

BLOCK_N = 128
"""Tokens of a program that scores."""
MAX_LISTED = 8192
"""Tokens of a list on a GPU: one program keeps their scores in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortlistScratch:
    """Buffers of `choose_listed` on a GPU, reused over layers and replays of a graph.

    Attributes
    ----------
    logits : torch.Tensor
        ``[num_reqs * num_kv_heads, padded_width, padded_group]``, float32, in base 2.
    part_lse : torch.Tensor
        ``[num_reqs * num_kv_heads, padded_width // BLOCK_N, padded_group]``, float32.
    """

    logits: torch.Tensor
    part_lse: torch.Tensor


def make_shortlist_scratch(
    num_reqs: int, num_qo_heads: int, num_kv_heads: int, width: int, device: torch.device
) -> ShortlistScratch:
    """Allocate the buffers of `choose_listed`.

    Parameters
    ----------
    num_reqs, width : int
        Largest values that will be used with it; `width` is that of the lists.
    num_qo_heads, num_kv_heads : int
        Heads, as they will be scored.
    device : torch.device
        Where.

    Returns
    -------
    ShortlistScratch
        About ``4 * num_reqs * num_qo_heads * width`` bytes. Calls that share it must be
        ordered by one stream.
    """
    rows, group = num_reqs * num_kv_heads, padded_group(num_qo_heads // num_kv_heads)
    blocks = -(-width // BLOCK_N)
    return ShortlistScratch(
        logits=torch.empty((rows, blocks * BLOCK_N, group), device=device),
        part_lse=torch.empty((rows, blocks, group), device=device),
    )


def choose_listed(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    listed: torch.Tensor,
    k: int,
    *,
    scale: float,
    pooling: str = "softmax_mean",
    page_size: int = 1,
    scratch: ShortlistScratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` best-scored of the positions on a list.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    k_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float: keys as attention reads them.
    slots : torch.Tensor
        ``[num_reqs, max_pages]``, integers: page of each run of `page_size` positions.
    listed : torch.Tensor
        ``[num_reqs, num_kv_heads, num_listed]``, int32: distinct positions, then ``-1``; from
        `tandemkv.kernels.select.score_topk`. On a GPU contiguous, at most `MAX_LISTED` of a head.
    k : int
        Positions per KV head, ``>= 0``.
    scale : float
        Of the logits.
    pooling : str
        As in `tandemkv.kernels.score.score_keys`; softmaxes are over what is listed.
    page_size : int
        Tokens of a page.
    scratch : ShortlistScratch, optional
        Buffers of the GPU version, from `make_shortlist_scratch`; else allocated.

    Returns
    -------
    chosen : torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32, in any order, padded with ``-1`` at the end. Of
        equal scores the lowest positions on a GPU, any on CPU.
    scores : torch.Tensor
        Likewise, float32: their scores, ``-inf`` for padding.

    Raises
    ------
    ValueError
        If an argument differs from the above.

    Notes
    -----
    On a GPU two launches, asynchronous and CUDA-graph safe. Queries are rounded to the dtype of
    the keys.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", FLOATS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    dims.check("slots", slots, "num_reqs max_pages", INTS)
    dims.check("listed", listed, "num_reqs num_kv_heads num_listed", INT32)
    check_int("k", k, minimum=0)
    if pooling not in POOLINGS:
        fail("pooling", repr(pooling), f"one of {POOLINGS}")
    if scratch is not None:
        dims.check("scratch.logits", scratch.logits, "have_rows have_width have_group", FLOAT32)
        needed = (dims["num_reqs"] * dims["num_kv_heads"], dims["num_listed"])
        group = padded_group(dims["num_qo_heads"] // dims["num_kv_heads"])
        if (
            scratch.logits.shape[0] < needed[0]
            or scratch.logits.shape[1] < needed[1]
            or scratch.logits.shape[2] != group
        ):
            fail("scratch", tuple(scratch.logits.shape), "made by make_shortlist_scratch for these")
    run = resolve("shortlist", "choose_listed", q.device)
    chosen: tuple[torch.Tensor, torch.Tensor] = run(
        q, k_pool, slots, listed, k, scale=scale, pooling=pooling, page_size=page_size,
        scratch=scratch,
    )  # fmt: skip
    return chosen
