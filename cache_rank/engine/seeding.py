# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a finished prompt are resident first."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.policies.base import Owner, Policy, SeedInput, StoredKV
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.score import score_window
from tandemkv.kernels.topk import topk_positions


def fill_set(policy: Policy, prompt: SeedInput, num_resident: int) -> torch.Tensor:
    """Return what is resident first of a prompt, ``[H, R]`` int32.

    The sink, then the best by `Policy.seed_scores`, which is not asked if nothing is left to
    choose, then the latest of the others, where scores choose too few; ``-1`` where there are no
    more candidates.
    """
    lo, target = prompt.lo, min(num_resident, prompt.hi)
    shape, device = (policy.context.model.num_kv_heads, num_resident), prompt.queries.device
    chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
    chosen[:, :lo] = torch.arange(lo, dtype=torch.int32, device=device)
    if target > lo:
        scores = policy.seed_scores(prompt)
        best = topk_positions(scores.unsqueeze(0), target - lo)[0]
        chosen[:, lo:target] = _filled(best, lo, prompt.hi)
    return chosen


def _filled(best: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return `best` ``[H, n]`` with the highest others of ``[lo, hi)`` for the ``-1`` at its end.

    A step attends to so many slots, whatever is in them: an empty one has the K and V of a request
    that is gone. Decode fills up with the same ones (`tandemkv.kernels.mirror`).
    """
    heads, n = best.shape
    is_missing = best < 0
    is_taken = torch.zeros((heads, hi + 1), dtype=torch.bool, device=best.device)
    is_taken.scatter_(1, torch.where(is_missing, hi, best).clamp(max=hi).long(), True)
    highest = torch.arange(hi - 1, max(lo, hi - 2 * n) - 1, -1, device=best.device)  # enough
    is_free = ~is_taken[:, highest]
    place = n - is_missing.sum(-1, keepdim=True) + is_free.cumsum(-1) - 1
    place = torch.where(is_free, place, n).clamp(max=n)  # what is not needed goes to the end
    filled = torch.nn.functional.pad(best, (0, 1))
    return filled.scatter_(1, place, highest.to(best.dtype).expand(heads, -1))[:, :n]


def seed_range(length: int, selection: SelectionSettings) -> tuple[int, int]:
    """Return the candidates ``[lo, hi)`` of a prompt, as of its first decode step.

    That step has one more token.
    """
    hi = max(0, length + 1 - selection.num_recent_tokens)
    return min(selection.num_sink_tokens, hi), hi


def make_seed_input(
    policy: Policy,
    layer: int,
    owner: Owner,
    queries: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor | None],
    stored: StoredKV,
    *,
    page_size: int,
) -> SeedInput:
    """Return the end of a prompt as `policy` sees it.

    `keys` with their scales and `page_size` are as for `tandemkv.kernels.score.score_window`;
    `stored` has the slots of all tokens of the prompt.
    """
    (k, k_scale), slots, context = keys, stored.slots[0], policy.context
    length, pages = len(slots), slots[::page_size] // page_size
    lo, hi = seed_range(length, context.selection)

    def score(own: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return score_window(
            own, k, pages, lo, hi, positions,
            scale=context.model.scale, k_scale=k_scale, page_size=page_size,
        )  # fmt: skip

    return SeedInput(
        layer=layer,
        owner=owner,
        queries=queries,
        positions=torch.arange(length - len(queries), length, device=queries.device),
        score=score,
        lo=lo,
        hi=hi,
        stored=stored,
        budget=context.selection.budget_tokens,
    )
