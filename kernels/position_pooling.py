# SPDX-License-Identifier: Apache-2.0
"""Max pooling of scores over positions; called by selection policies."""

import math

import torch
import torch.nn.functional as F

from tandemkv.kernels.check import FLOAT32, Dims, check_int, fail
from tandemkv.kernels.dispatch import uses_triton

MAX_REACH = 31


def pool_positions(scores: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Give each position the highest score of itself, `before` positions before and `after` after.

    What follows the tokens that are asked for now is often asked for next: a selection that is used
    a step later, or in another layer, is better made of short runs than of single tokens.

    Parameters
    ----------
    scores : torch.Tensor
        ``[num_reqs, num_kv_heads, max_len]``, float32, dense in the last dimension. Positions with
        ``-inf`` or NaN are no candidates.
    before, after : int
        Positions on either side whose scores count, 0 to `MAX_REACH`.

    Returns
    -------
    torch.Tensor
        As `scores`, ``-inf`` where a position is no candidate, for itself or its neighbours.
        `scores` itself where no other position counts.

    References
    ----------
    With `before` equal to `after` the pooling of SnapKV (arXiv:2404.14469, section 4.2) with
    stride 1, over candidates alone.
    """
    dims = Dims()
    dims.check("scores", scores, "num_reqs num_kv_heads max_len", FLOAT32)
    check_reach(before, after)
    if not (before or after) or not scores.numel():
        return scores
    if scores.stride(2) != 1:
        fail("scores.stride(2)", scores.stride(2), "1")
    if uses_triton(scores.device):
        from tandemkv.kernels.triton_ops.position_pooling import pool_positions as on_gpu

        return on_gpu(scores, before, after)
    is_candidate = scores > -math.inf
    own = torch.where(is_candidate, scores, -math.inf)
    padded = F.pad(own, (before, after), value=-math.inf)
    pooled = F.max_pool1d(padded, kernel_size=before + 1 + after, stride=1)
    return torch.where(is_candidate, pooled, -math.inf)


def check_reach(before: int, after: int) -> None:
    """Raise `ValueError` unless both are between 0 and `MAX_REACH`."""
    check_int("before", before, minimum=0, maximum=MAX_REACH)
    check_int("after", after, minimum=0, maximum=MAX_REACH)
