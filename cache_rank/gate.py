# SPDX-License-Identifier: Apache-2.0
"""The gate: a row is exact in a layer where its true query is far from the one selected with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.kernels.placing import place

from .policies.base import Owner, Policy, PolicyError, ScoringPolicy
from .protocol.messages import Timing
from .protocol.settings import SelectionSettings


def moved_rows(
    owners: Sequence[Owner],
    query: torch.Tensor,
    scored: tuple[Sequence[Owner], torch.Tensor] | None,
    threshold: float,
) -> torch.Tensor:
    """Compare true queries with those that the selection in use was made with.

    Parameters
    ----------
    owners : Sequence[Owner]
        X requests.
    query : torch.Tensor
        ``[X, Hq, D]``, their true queries.
    scored : tuple or None
        S requests and the queries ``[S, Hq, D]`` of the latest selection in the layer.
    threshold : float
        Cosine below which a row has moved; the mean over query heads counts.

    Returns
    -------
    torch.Tensor
        ``[X]`` bool; False for a request that nothing was selected for yet: its set is that of its
        prompt.
    """
    moved = torch.zeros(len(owners), dtype=torch.bool, device=query.device)
    if scored is None:
        return moved
    known = {owner: i for i, owner in enumerate(scored[0])}
    pairs = [(i, known[owner]) for i, owner in enumerate(owners) if owner in known]
    if pairs:
        ours, theirs = (place(places, query.device) for places in zip(*pairs, strict=True))
        cosine = torch.cosine_similarity(query[ours].float(), scored[1][theirs].float(), dim=-1)
        moved[ours] = cosine.mean(dim=-1) < threshold
    return moved


def check_gate(policy: type[Policy], selection: SelectionSettings) -> None:
    """Refuse a gate on a policy that has nothing to compare with.

    Raises
    ------
    PolicyError
        If the policy does not score with a predicted or earlier query.
    """
    timing = policy.capabilities.timing
    predicts = timing in (Timing.SAME_STEP_HIDDEN, Timing.NEXT_STEP)
    if selection.gate_cosine and not (predicts and issubclass(policy, ScoringPolicy)):
        raise PolicyError(
            f"gate_cosine={selection.gate_cosine}: policy={selection.policy} selects with no "
            "predicted query; leave the gate out, or use look_ahead, async_spade or last_query"
        )
