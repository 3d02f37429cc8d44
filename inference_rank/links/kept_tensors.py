# SPDX-License-Identifier: Apache-2.0
"""Mapped memory of the inference rank that survives epochs, and the rank itself."""

from __future__ import annotations

from tandemkv.cache_rank.protocol.memory.descriptor_socket import let_hold, take_held
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes, is_pool, specs_by_life
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.models.predictor_weights import PREDICTOR_PREFIX
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .connection import KEPT


def make_tensors(
    group: str, model: ModelSpec, settings: RankSettings, sizes: RegionSizes, homes: Homes,
    run_dir: RunDir,
) -> MappedTensors:  # fmt: skip
    """Make what survives an epoch, where `homes` says: a `group` of `RegionSpecs`.

    `KEPT` is what all cache ranks map, and `OWN` is of the one with the heads of `sizes`, whose
    `run_dir` and `homes` they are then. What the launcher holds of an earlier inference rank is
    taken instead; what was stored in it is forgotten. The launcher holds it from then on. Raises
    `SettingsError` if the memory is not to be had; nothing is left then.
    """
    specs = specs_by_life(model, settings.selection, sizes, on_gpu=homes.are_on_gpu)
    wanted = specs.kept if group == KEPT else specs.own
    if not wanted:
        return MappedTensors(homes)
    # K/V take memory when they are written.
    is_sparse = group == KEPT and settings.placement.has_far_host and not homes.are_on_gpu
    holder, token = run_dir.holder_socket, run_dir.token
    kept = take_held(holder, token=token, group=group, homes=homes)
    for spec in kept.specs:
        if spec.name.startswith(PREDICTOR_PREFIX):  # put anew, of the model that is loaded now
            kept.forget(spec.name)
    if kept.specs == wanted:
        for spec in wanted:
            if not is_pool(spec):  # which slots hold something, the tables say
                kept[spec.name].zero_()
        return kept
    kept.close()
    kept = MappedTensors(homes)
    # What was made with other settings must not take the memory of what is made now.
    let_hold(holder, kept, token=token, group=group)
    try:
        for spec in wanted:
            if is_sparse and is_pool(spec):
                kept.allocate_sparse(spec)  # what prompts need: the pump gives the rest back
            else:
                kept.allocate_all([spec])
    except BaseException:
        kept.close()
        raise
    let_hold(holder, kept, token=token, group=group)
    return kept
