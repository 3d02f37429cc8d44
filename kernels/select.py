# SPDX-License-Identifier: Apache-2.0
"""Choice of the best-scored positions under a query, in one operation.

Called each step for each layer by a cache rank that keeps its books on the device that holds
the keys; `tandemkv.kernels.score` and `tandemkv.kernels.topk` are the two halves of it.
"""

from dataclasses import dataclass, replace

import torch

from tandemkv.kernels.check import Dims, check_int, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.position_pooling import check_reach, pool_positions
from tandemkv.kernels.score import KeyScan, ScoreScratch, make_score_scratch, score_keys
from tandemkv.kernels.topk import best_scored, make_topk_scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectScratch:
    """Buffers of `score_topk` on a GPU, reused over layers and replays of a graph."""

    score: ScoreScratch
    """What stands between the pass over the keys and the choice."""
    lists: torch.Tensor
    """``[num_reqs * num_kv_heads, size]``, int32: see `make_topk_scratch`."""
    head_lse: torch.Tensor
    """``[num_reqs, num_kv_heads, padded_group]``, float32: log2 of each query head's sum."""


def make_select_scratch(
    num_reqs: int,
    num_qo_heads: int,
    num_kv_heads: int,
    width: int,
    k: int,
    device: torch.device,
) -> SelectScratch:
    """Allocate the buffers of `score_topk`, for the largest call; see `make_score_scratch`."""
    score = make_score_scratch(num_reqs, num_qo_heads, num_kv_heads, width, device)
    return SelectScratch(
        score=score,
        lists=make_topk_scratch(num_reqs, num_kv_heads, k, device),
        head_lse=torch.empty((*score.logits.shape[:2], score.logits.shape[3]), device=device),
    )


def score_topk(
    keys: KeyScan,
    k: int,
    *,
    scratch: SelectScratch | None = None,
    scan_stream: torch.cuda.Stream | None = None,
    pooled_positions: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the `k` highest scores, and the scores.

    Parameters
    ----------
    keys : KeyScan
        As for `tandemkv.kernels.score.score_keys`.
    k : int
        Positions per KV head, ``>= 0``.
    scratch : SelectScratch, optional
        Buffers of the GPU version, from `make_select_scratch`; else allocated.
    scan_stream : torch.cuda.Stream, optional
        Where the pass over the keys runs, between the rest: on a stream of lower priority it
        lets the small kernels of others through.
    pooled_positions : tuple of int, optional
        Scores are pooled over as many positions before and after first; see `pool_positions`.

    Returns
    -------
    positions : torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32, distinct, in any order, padded with ``-1`` at
        the end. Of equal scores the lowest positions are chosen.
    scores : torch.Tensor
        Likewise, float32: their scores, ``-inf`` for padding.

    Notes
    -----
    On a GPU four launches for ``softmax_mean``, whose scores are never written to memory, up to six
    for the others. With `pooled_positions` up to nine, and scores are written twice,
    ``[num_reqs, num_kv_heads, width]`` float32 each. Exact for any content, as
    `tandemkv.kernels.topk.topk_positions` is. Of int4 keys, for groups of three heads and more and
    without `pooled_positions`, exact among coded scores: between the two passes a head's softmax,
    relative to the largest of at most 64 tokens, is a byte, five bits of exponent and three of
    mantissa. A share of 2**-14 and more is within a sixteenth, one below may be off by 2**-18, and
    below 2**-18 it counts as none. What stands in the scratch afterwards is undefined.
    """
    dims = keys.check()
    check_int("k", k, minimum=0)
    if scratch is not None:
        _check_scratch(dims, scratch, keys.width)
    check_reach(*pooled_positions)
    if uses_triton(keys.q.device):
        from tandemkv.kernels.triton_ops.select import score_topk as on_gpu

        return on_gpu(
            keys, k, scratch=scratch, scan_stream=scan_stream, pooled_positions=pooled_positions
        )
    # What is scored is written and searched in full here: no further than any request has come.
    longest = min(keys.width, max(0, *keys.hi.tolist())) if len(keys.hi) else 0
    scores = score_keys(replace(keys, width=longest))
    return best_scored(pool_positions(scores, *pooled_positions), k)


def _check_scratch(dims: Dims, scratch: SelectScratch, width: int) -> None:
    have, rows = scratch.score.logits.shape, dims["num_reqs"] * dims["num_kv_heads"]
    if (
        have[0] < dims["num_reqs"]
        or have[1] != dims["num_kv_heads"]
        or have[2] < width + 256
        or scratch.lists.shape[0] < rows
    ):
        fail("scratch", tuple(have), "made by make_select_scratch for these sizes")
