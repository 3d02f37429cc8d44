# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.select`: scores, then the best of them."""

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
