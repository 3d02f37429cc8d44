# SPDX-License-Identifier: Apache-2.0
"""Choice of the best-scored positions; called by selection policies."""

import torch

from tandemkv.kernels.check import FLOAT32, Dims, check_int
from tandemkv.kernels.dispatch import resolve


def topk_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the `k` highest scores, best first.

    Parameters
    ----------
    scores : torch.Tensor
        ``[num_reqs, num_kv_heads, max_len]``, float32. ``-inf`` and NaN are
        never chosen.
    k : int
        Positions per head, ``>= 0``; may exceed ``max_len``.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32, distinct, padded with ``-1`` at
        the end where fewer than `k` scores can be chosen. Ties are broken the
        same way each time, not necessarily by position.

    Raises
    ------
    ValueError
        If `scores` or `k` differs from the above.
    """
    dims = Dims()
    dims.check("scores", scores, "num_reqs num_kv_heads max_len", FLOAT32)
    check_int("k", k, minimum=0)
    positions: torch.Tensor = resolve("topk", "topk_positions", scores.device)(scores, k)
    return positions
