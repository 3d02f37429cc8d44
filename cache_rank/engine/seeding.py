# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a finished prompt are resident first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandemkv.cache_rank.policies.base import Owner, SeedInput, StoredKV
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.score import score_window
from tandemkv.kernels.topk import topk_positions


def fill_set(
    score: Callable[[], torch.Tensor],
    *,
    num_heads: int,
    length: int,
    selection: SelectionSettings,
    num_resident: int,
    device: torch.device,
) -> torch.Tensor:
    """Return what is resident first of a prompt.

    Parameters
    ----------
    score : callable
        Ranks the candidates, ``[H, hi]`` float32 with ``-inf`` on the sink; not asked if there are
        none.
    num_heads, num_resident : int
        H, R.
    length : int
        Tokens of the prompt.

    Returns
    -------
    torch.Tensor
        ``[H, R]`` int32: the sink, then the best by score, ``-1`` where there are no more.
    """
    lo, hi = seed_range(length, selection)
    target = min(num_resident, hi)
    chosen = torch.full((num_heads, num_resident), -1, dtype=torch.int32, device=device)
    chosen[:, :lo] = torch.arange(lo, dtype=torch.int32, device=device)
    if target > lo:
        chosen[:, lo:target] = topk_positions(score().unsqueeze(0), target - lo)[0]
    return chosen


def seed_range(length: int, selection: SelectionSettings) -> tuple[int, int]:
    """Return the candidates ``[lo, hi)`` of a prompt, as of its first decode step.

    That step has one more token.
    """
    hi = max(0, length + 1 - selection.num_recent_tokens)
    return min(selection.num_sink_tokens, hi), hi


def make_seed_input(
    layer: int,
    owner: Owner,
    queries: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor | None],
    stored: StoredKV,
    *,
    pages: torch.Tensor,
    page_size: int,
    length: int,
    selection: SelectionSettings,
    scale: float,
) -> SeedInput:
    """Return the end of a prompt as a policy sees it.

    `keys` with their scales, `pages` and `page_size` are as for
    `tandemkv.kernels.score.score_window`; the prompt has `length` tokens.
    """
    (k, k_scale), (lo, hi) = keys, seed_range(length, selection)

    def score(own: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return score_window(
            own, k, pages, lo, hi, positions, scale=scale, k_scale=k_scale, page_size=page_size
        )

    return SeedInput(
        layer=layer,
        owner=owner,
        queries=queries,
        positions=torch.arange(length - len(queries), length, device=queries.device),
        score=score,
        lo=lo,
        hi=hi,
        stored=stored,
        budget=selection.budget_tokens,
    )
