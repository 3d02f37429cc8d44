# SPDX-License-Identifier: Apache-2.0
"""Building of the in-process cache rank, for policies that can run there."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from tandemkv.cache_rank.calibration.resolve import resolve_calibration
from tandemkv.cache_rank.model_adapters.rotary import read_rotary
from tandemkv.cache_rank.policies.base import Policy, PolicyContext, PolicyError, ScoringPolicy
from tandemkv.cache_rank.policies.kascade import KascadePolicy
from tandemkv.cache_rank.policies.registry import check_pooling, find_policy
from tandemkv.cache_rank.protocol.local import LocalPools, PredictQuery
from tandemkv.cache_rank.protocol.messages import PolicyTraits
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import RankSettings

from .query_windows import has_device_windows
from .rank import InProcessCacheRank


def create(
    *,
    model: ModelSpec,
    settings: RankSettings,
    pools: LocalPools,
    max_batch: int,
    predict_query: PredictQuery,
    model_dir: Path | None = None,
) -> InProcessCacheRank:
    """Build the in-process cache rank; see `tandemkv.cache_rank.protocol.local`.

    Raises
    ------
    PolicyError
        If the policy needs more than queries and scores.
    """
    return InProcessCacheRank(
        model=model,
        settings=settings,
        pools=pools,
        max_batch=max_batch,
        predict_query=predict_query,
        policy=make_policy(model, settings, model_dir),
    )


def make_policy(model: ModelSpec, settings: RankSettings, model_dir: Path | None) -> Policy:
    """Build the policy of an engine.

    Raises
    ------
    PolicyError
        If the policy needs more than queries and scores.
    """
    selection = settings.selection
    policy_class = find_policy(selection.policy)
    check_pooling(policy_class, selection)
    reads_rotary = policy_class.capabilities.wants_query_window and selection.ridge_unrotate
    rotary = read_rotary(model_dir) if reads_rotary and model_dir is not None else None
    share = resolve_calibration(selection, model, policy_class.capabilities.timing).share
    context = PolicyContext(model=model, selection=selection, rotary=rotary, share=share)
    policy = policy_class(context)
    if policy.capabilities.selects and not can_run_in_process(policy):
        raise PolicyError(
            f"policy={selection.policy} keeps state on the host or reads more than scores and "
            "cannot run in the inference rank's process; use look_ahead, kascade (with "
            "kascade_fraction=0), async_spade, last_query, mean_query, oracle, streaming or "
            "exact, or start a cache rank with --cache-ranks 1"
        )
    return policy


def can_run_in_process(policy: Policy) -> bool:
    """Whether `policy` is no more than a score with one query, layer by layer.

    That query must be the one it is given, or one that is predicted on the device. A selection may
    be shared by other layers.
    """
    return (
        isinstance(policy, ScoringPolicy)
        and _takes_best(policy)
        and (type(policy).query_for is ScoringPolicy.query_for or has_device_windows(policy))
        and structs.replace(policy.traits, layer_sources=()) == PolicyTraits()
    )


def _takes_best(policy: ScoringPolicy) -> bool:
    select = type(policy).select  # a user's own is not run here
    if select is KascadePolicy.select:
        return policy.context.selection.kascade_fraction == 0.0
    return select is ScoringPolicy.select
