# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.select`: scores, then the best of them."""

from typing import Any

import torch

from tandemkv.kernels.position_pooling import pool_positions
from tandemkv.kernels.reference.score import score_keys
from tandemkv.kernels.reference.topk import topk_positions
from tandemkv.kernels.select import SelectScratch


def score_topk(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: int,
    *,
    width: int,
    scale: float,
    pooling: str = "softmax_mean",
    k_scale: torch.Tensor | None = None,
    page_size: int = 1,
    active: torch.Tensor | None = None,
    scratch: SelectScratch | None = None,
    scan_stream: torch.cuda.Stream | None = None,
    pooled_positions: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose positions; see `tandemkv.kernels.select.score_topk`."""
    del scratch, scan_stream  # only the GPU version keeps something between its passes
    scores = score_keys(
        q, k_pool, slots, lo, hi, width=width, scale=scale, pooling=pooling, k_scale=k_scale,
        page_size=page_size, active=active,
    )  # fmt: skip
    scores = pool_positions(scores, *pooled_positions)
    out_scores = torch.empty((*scores.shape[:2], k), device=q.device)
    return topk_positions(scores, k, sort=False, out_scores=out_scores), out_scores


def list_best(*arguments: Any, **options: Any) -> torch.Tensor:
    """List positions; see `tandemkv.kernels.select.list_best`."""
    k, size = arguments[5:]
    lo, hi = arguments[3:5]
    listed, scores = score_topk(*(*arguments[:5], size), **options)
    if not size:
        return listed
    is_cut = (hi.clamp(max=options["width"]) - lo.clamp(min=0) > size)[:, None, None]
    best = scores.argsort(dim=-1, descending=True)
    listed = listed.gather(-1, best)
    listed[..., (k + size) // 2 :].masked_fill_(is_cut, -1)
    return listed
