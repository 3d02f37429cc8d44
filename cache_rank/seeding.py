# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a finished prompt are resident first."""

from __future__ import annotations

import torch

from tandemkv.kernels.position_pooling import pool_positions
from tandemkv.kernels.score import score_window
from tandemkv.kernels.topk import topk_positions

from .protocol.settings import SelectionSettings


def choose_seed(
    queries: torch.Tensor,
    keys: torch.Tensor,
    k_scale: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    length: int,
    selection: SelectionSettings,
    num_resident: int,
    scale: float,
    page_size: int = 1,
) -> torch.Tensor:
    """Choose by the scores that the last prompt queries give.

    Parameters
    ----------
    queries : torch.Tensor
        ``[W, Hq, D]``, the last queries of the prompt.
    keys, k_scale, slots, page_size
        As in `tandemkv.kernels.score.score_window`.
    length : int
        Tokens of the prompt.
    num_resident : int
        R.

    Returns
    -------
    torch.Tensor
        ``[H, R]`` int32: the sink, then the best by score, ``-1`` where there are no more.
    """
    # As of the first decode step, which has one more token.
    hi = max(0, length + 1 - selection.num_recent_tokens)
    num_sink, target = min(selection.num_sink_tokens, hi), min(num_resident, hi)
    num_heads = keys.shape[1]
    chosen = torch.full((num_heads, num_resident), -1, dtype=torch.int32, device=queries.device)
    chosen[:, :num_sink] = torch.arange(num_sink, dtype=torch.int32, device=queries.device)
    if target > num_sink:
        positions = torch.arange(length - len(queries), length, device=queries.device)
        scores = score_window(
            queries,
            keys,
            slots,
            num_sink,
            hi,
            positions,
            scale=scale,
            k_scale=k_scale,
            page_size=page_size,
        )
        pooled = pool_positions(scores.unsqueeze(0), *selection.pooled_positions)
        chosen[:, num_sink:target] = topk_positions(pooled, target - num_sink)[0]
    return chosen
