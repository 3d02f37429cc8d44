# SPDX-License-Identifier: Apache-2.0
"""Building of the engine."""

from __future__ import annotations

from pathlib import Path

import torch

from tandemkv.cache_rank.calibration.resolve import resolve_calibration
from tandemkv.cache_rank.policies.base import Policy, PolicyContext
from tandemkv.cache_rank.policies.checkpoint import Checkpoint
from tandemkv.cache_rank.policies.composition import (
    check_device,
    check_kv_dtype,
    check_placement,
    check_shards,
)
from tandemkv.cache_rank.policies.registry import (
    check_pooling,
    check_resolved,
    find_policy,
    options_of,
)
from tandemkv.cache_rank.protocol.engine import EnginePools, PredictQuery
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .cache_engine import CacheEngine
from .rotary import read_rotary

_CPU = torch.device("cpu")


def create(
    *,
    model: ModelSpec,
    settings: RankSettings,
    pools: EnginePools,
    max_batch: int,
    predict_query: PredictQuery,
    model_dir: Path | None = None,
    calibrated: ModelSpec | None = None,
) -> CacheEngine:
    """Build the engine; see `tandemkv.cache_rank.protocol.engine`.

    `calibrated` is the model that a calibration is of, if not `model` itself. Raises `PolicyError`
    if the policy cannot run on the pools' device, or the settings are not for it.
    """
    return CacheEngine(
        model=model,
        settings=settings,
        pools=pools,
        max_batch=max_batch,
        predict_query=predict_query,
        policy=make_policy(
            model, settings, model_dir, device=pools.k[0].device, calibrated=calibrated
        ),
    )


def make_policy(
    model: ModelSpec,
    settings: RankSettings,
    model_dir: Path | None,
    *,
    device: torch.device = _CPU,
    calibrated: ModelSpec | None = None,
) -> Policy:
    """Build the policy of an engine on `device`; `calibrated` as for `create`.

    Raises `PolicyError` if it cannot run there, or the settings are not for it.
    """
    selection = settings.selection
    policy_class = find_policy(selection.policy)
    capabilities = policy_class.capabilities
    check_resolved(policy_class, selection)
    check_device(policy_class, selection.policy, device.type)
    check_kv_dtype(policy_class, selection.policy, model.dtype)
    check_placement(policy_class, selection.policy, settings.placement)
    check_shards(policy_class, selection.policy, settings.placement.head_shards)
    check_pooling(policy_class, selection)
    reads_rotary = options_of(policy_class, selection).reads_rotary(capabilities)
    found = resolve_calibration(selection, calibrated or model, capabilities)
    return policy_class(
        PolicyContext(
            model=model,
            selection=selection,
            device=device,
            checkpoint=Checkpoint(model_dir) if model_dir is not None else None,
            rotary=read_rotary(model_dir) if reads_rotary and model_dir is not None else None,
            share=found.share,
            clusters=found.clusters,
            has_strided_pools=settings.placement.num_sharing > 1,
        )
    )
