# SPDX-License-Identifier: Apache-2.0
"""Choice of the best-scored positions; called by selection policies."""

import torch

from tandemkv.kernels.check import FLOAT32, Dims, check_int
from tandemkv.kernels.dispatch import uses_triton

_INF = float("inf")


def make_topk_scratch(
    num_reqs: int, num_kv_heads: int, k: int, device: torch.device | str
) -> torch.Tensor:
    """Allocate what a choice works in on a GPU, for the largest call, shared by all layers.

    Calls that share it must be on one stream. ``[num_reqs * num_kv_heads, size]`` int32, content
    undefined; `size` is 0 where the device needs nothing.
    """
    device = torch.device(device)
    size = 0
    if device.type == "cuda":
        from tandemkv.kernels.triton_ops.topk import capacity_of

        size = 2 + 2 * capacity_of(k)
    return torch.empty((num_reqs * num_kv_heads, size), dtype=torch.int32, device=device)


def topk_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the `k` highest scores, best first.

    Parameters
    ----------
    scores : torch.Tensor
        ``[num_reqs, num_kv_heads, max_len]``, float32. ``-inf`` and NaN are never chosen.
    k : int
        Positions per head, ``>= 0``; may exceed ``max_len``.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32, distinct, padded with ``-1`` at
        the end where fewer than `k` scores can be chosen. Of equal scores the lowest positions
        are chosen, and come first.

    Notes
    -----
    On a GPU the grid depends on shapes only. Exact for any content; content with very many equal
    scores near the threshold takes a slower path.
    """
    Dims().check("scores", scores, "num_reqs num_kv_heads max_len", FLOAT32)
    check_int("k", k, minimum=0)
    if uses_triton(scores.device):
        from tandemkv.kernels.triton_ops.topk import topk_positions as on_gpu

        return on_gpu(scores, k)
    return best_scored(scores, k)[0]


def best_scored(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `topk_positions` does, in plain torch, and the scores, ``-inf`` for padding."""
    num_reqs, num_kv_heads, max_len = scores.shape
    shape = num_reqs, num_kv_heads, k
    positions = torch.full(shape, -1, dtype=torch.int32, device=scores.device)
    best = torch.full(shape, -_INF, device=scores.device)
    num_found = min(k, max_len)
    if num_found:
        ranked = torch.nan_to_num(scores, nan=-_INF, posinf=_INF, neginf=-_INF)
        # One more tells if equal ones are cut.
        values, indices = torch.topk(ranked, min(num_found + 1, max_len), dim=-1, sorted=True)
        is_tied = ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -_INF)).any(dim=-1)
        values, indices = values[..., :num_found], indices[..., :num_found]
        if bool(is_tied.any()):
            indices[is_tied] = _lowest_of_equal(ranked[is_tied], num_found)
        positions[..., :num_found] = torch.where(values > -_INF, indices, -1)
        best[..., :num_found] = values
    return positions, best


def _lowest_of_equal(ranked: torch.Tensor, k: int) -> torch.Tensor:
    """Return places ``[n, k]`` of the best of ``[n, max_len]``, of equal ones the lowest first.

    `torch.topk` takes any of them. Few scores are equal as a rule; pooled ones are.
    """
    bits = (ranked + 0.0).view(torch.int32)  # -0.0 equals 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    order -= torch.arange(ranked.shape[-1], device=ranked.device)
    return torch.topk(order, k, dim=-1, sorted=True).indices
