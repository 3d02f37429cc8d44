# SPDX-License-Identifier: Apache-2.0
"""Choice among the tokens that an earlier scan of all keys ranked best.

A shortlist holds, for each request row and KV head, the best positions of that scan. A step
scores them, and the few tokens that became candidates since, under its own query; a scan
replaces the list every few steps, after the step's choice, when nobody waits for it. LFPS, too,
takes exact scores of candidates alone; its candidates come from past attention, these from a
scan with a past query.

State, per layer
    positions
        ``[num_rows, num_kv_heads, num_listed]``, int32, ``-1`` where there are fewer.
    covered
        ``[num_rows]``, int32: the scan saw the candidates before this position.
"""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import BOOL, FLOAT32, FLOATS, INT32, INT64, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import resolve
from tandemkv.kernels.score import POOLINGS, padded_group

BLOCK_N = 64
"""Tokens of a program that scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortlistScratch:
    """Buffers of `choose_shortlisted` on a GPU, reused over layers and replays of a graph.

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
    """Allocate the buffers of `choose_shortlisted`.

    Parameters
    ----------
    num_reqs, width : int
        Largest values that will be used with it; `width` is ``num_listed + num_new``.
    num_qo_heads, num_kv_heads : int
        Heads, as they will be scored.
    device : torch.device
        Where.
    """
    rows, group = num_reqs * num_kv_heads, padded_group(num_qo_heads // num_kv_heads)
    blocks = -(-width // BLOCK_N)
    return ShortlistScratch(
        logits=torch.empty((rows, blocks * BLOCK_N, group), device=device),
        part_lse=torch.empty((rows, blocks, group), device=device),
    )


def choose_shortlisted(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
    rows: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: int,
    *,
    num_new: int,
    active: torch.Tensor,
    step: torch.Tensor,
    every: int,
    phase: int,
    due: torch.Tensor,
    scale: float,
    pooling: str = "softmax_mean",
    page_size: int = 1,
    scratch: ShortlistScratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` best-scored positions of a shortlist and of what came after it.

    Candidates are those listed that lie in ``[lo, hi)``, and ``[covered, hi)``; if these are
    more than `num_new`, the newest of them.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    k_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float: keys as attention reads them.
    slots : torch.Tensor
        ``[num_reqs, max_pages]``, integers: page of each run of `page_size` positions.
    positions, covered : torch.Tensor
        The layer's shortlists, see the module.
    rows : torch.Tensor
        ``[num_reqs]``, int64: whose they are.
    lo, hi : torch.Tensor
        ``[num_reqs]``, int32.
    k : int
        Positions per KV head, ``>= 0``.
    num_new : int
        Most tokens beside the list.
    active : torch.Tensor
        ``[num_reqs]``, bool; nothing is chosen for the others.
    step : torch.Tensor
        ``[]``, int32.
    every, phase : int
        The list is due for a scan where ``(step + phase) % every == 0``.
    due : torch.Tensor
        ``[num_reqs]``, bool. Written: active, and due for a scan by `every`, or because more
        than `num_new` tokens came since.
    scale : float
        Of the logits.
    pooling : str
        As in `tandemkv.kernels.score.score_keys`; softmaxes are over the candidates above.
    page_size : int
        Tokens of a page.
    scratch : ShortlistScratch, optional
        Buffers of the GPU version, from `make_shortlist_scratch`; else allocated.

    Returns
    -------
    chosen : torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32, distinct, in any order, padded with ``-1`` at
        the end. Of equal scores the lowest positions on a GPU, any on CPU.
    scores : torch.Tensor
        Likewise, float32: their scores, ``-inf`` for padding.

    Raises
    ------
    ValueError
        If an argument differs from the above.

    Notes
    -----
    On a GPU two launches, asynchronous and CUDA-graph safe. A listed position must be of a
    token that still lies where `slots` says, or not be in ``[lo, hi)``.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", FLOATS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    dims.check("slots", slots, "num_reqs max_pages", INTS)
    dims.check("positions", positions, "num_rows num_kv_heads num_listed", INT32)
    dims.check("covered", covered, "num_rows", INT32)
    dims.check("rows", rows, "num_reqs", INT64)
    dims.check("lo", lo, "num_reqs", INT32)
    dims.check("hi", hi, "num_reqs", INT32)
    dims.check("active", active, "num_reqs", BOOL)
    dims.check("due", due, "num_reqs", BOOL)
    dims.check("step", step, "", INT32)
    for name, value, minimum in (("k", k, 0), ("num_new", num_new, 1), ("every", every, 1)):
        check_int(name, value, minimum=minimum)
    if pooling not in POOLINGS:
        fail("pooling", repr(pooling), f"one of {POOLINGS}")
    if scratch is not None:
        dims.check("scratch.logits", scratch.logits, "have_rows have_width have_group", FLOAT32)
        needed = (dims["num_reqs"] * dims["num_kv_heads"], dims["num_listed"] + num_new)
        if scratch.logits.shape[0] < needed[0] or scratch.logits.shape[1] < needed[1]:
            fail("scratch", tuple(scratch.logits.shape), "made by make_shortlist_scratch for these")
    run = resolve("shortlist", "choose_shortlisted", q.device)
    chosen: tuple[torch.Tensor, torch.Tensor] = run(
        q, k_pool, slots, positions, covered, rows, lo, hi, k, num_new=num_new, active=active,
        step=step, every=every, phase=phase, due=due, scale=scale, pooling=pooling,
        page_size=page_size, scratch=scratch,
    )  # fmt: skip
    return chosen


def store_shortlist(
    found: torch.Tensor,
    hi: torch.Tensor,
    due: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
) -> None:
    """Replace the shortlists of the requests that were due, in place.

    Parameters
    ----------
    found : torch.Tensor
        ``[num_reqs, num_kv_heads, num_listed]``, int32: what the scan ranked best.
    hi : torch.Tensor
        ``[num_reqs]``, int32: end of the candidates that it saw.
    due : torch.Tensor
        ``[num_reqs]``, bool; rows of the others stay as they are.
    rows, positions, covered : torch.Tensor
        As in `choose_shortlisted`; rows of those that are due are distinct.

    Raises
    ------
    ValueError
        If a shape, dtype or device differs from the above.
    """
    dims = Dims()
    dims.check("found", found, "num_reqs num_kv_heads num_listed", INT32)
    dims.check("hi", hi, "num_reqs", INT32)
    dims.check("due", due, "num_reqs", BOOL)
    dims.check("rows", rows, "num_reqs", INT64)
    dims.check("positions", positions, "num_rows num_kv_heads num_listed", INT32)
    dims.check("covered", covered, "num_rows", INT32)
    if not found.is_contiguous() or not positions.is_contiguous():
        fail("strides of found, positions", (found.stride(), positions.stride()), "dense")
    resolve("shortlist", "store_shortlist", found.device)(found, hi, due, rows, positions, covered)
