# SPDX-License-Identifier: Apache-2.0
"""What ``tandemkv calibrate MODEL`` leaves in the user's cache folder, and ``serve`` takes up.

A folder for each model, by its hash: projections that predict queries, a file for each distance,
and the channels of keys that an index has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.index_channels import (
    STEP,
    check_index_channels,
    num_index_channels,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import DEFAULT_POLICY, SelectionSettings
from tandemkv.server.settings.launch_settings import ServeSettings

from .embedded_model import cache_root

CALIBRATED_POLICY = DEFAULT_POLICY
_ADVICE = (
    "not calibrated: `tandemkv calibrate MODEL`, once, makes steps over long contexts shorter "
    "(docs/policies.md#calibrating-a-model)"
)


def calibration_folder(model: ModelSpec) -> Path:
    """Return where the files of `model` are kept; it may not be there yet."""
    return cache_root() / "calibrated" / model.model_hash


def queries_file(model: ModelSpec, distance: int) -> Path:
    """Return the file of `FittedQueries` that are `distance` layers ahead."""
    return calibration_folder(model) / f"queries-{distance}.safetensors"


def channels_file(model: ModelSpec) -> Path:
    """Return the file of `read_index_channels`."""
    return calibration_folder(model) / "channels.safetensors"


def kept_channels(head_dim: int) -> int | None:
    """Return how many channels of a key ``serve`` scans: half of them; None: too few to halve."""
    count = -(-head_dim // (2 * STEP)) * STEP
    return count if count < head_dim else None


def with_calibration(
    settings: ServeSettings, model: ModelSpec, progress: Callable[[str], None]
) -> ServeSettings:
    """Fill in files of `model` where nothing else was named, and tell `progress` of them.

    They are for `look_ahead`, whose quality was measured with them, and channels for an index of
    int8 or int4. A cache rank that is started by itself has files of its own host, if any: there
    nothing is filled in. Raises `SettingsError` if a file is damaged, saying how it is made anew.
    """
    selection = settings.selection
    if not _takes_files(settings):
        return settings
    found = _with_files(selection, model)
    if found is selection:
        return settings
    from tandemkv.cache_rank.protocol.models.fitted_queries import FittedQueries

    try:
        check_index_channels(found, model)
        FittedQueries.of(found, model)
    except SettingsError as error:
        raise SettingsError(
            f"{error}. A file that nobody named is what `tandemkv calibrate MODEL` has left: run "
            "that again, or add --no-calibrated"
        ) from error
    channels = num_index_channels(found)
    parts = [] if channels is None else [f"{channels} of {model.head_dim} channels in the index"]
    if found.declared.predictor:
        parts.insert(0, "fitted queries")
    progress(f"calibrated: {', '.join(parts)}; --no-calibrated serves without")
    return settings.model_copy(update={"selection": found})


def calibration_advice(settings: ServeSettings, model: ModelSpec) -> str | None:
    """Return what to tell whoever serves on GPUs without; None if it would change nothing."""
    selection = settings.selection
    has_all = not selection.index_channels and selection.index_dtype != "native"
    can_have = kept_channels(model.head_dim) is not None and not model.linear_layers
    return _ADVICE if has_all and can_have and _takes_files(settings) else None


def _takes_files(settings: ServeSettings) -> bool:
    is_alone = settings.cache_rank_address is not None or settings.nnodes > 1
    return settings.calibrated and not is_alone and settings.selection.policy == CALIBRATED_POLICY


def _with_files(selection: SelectionSettings, model: ModelSpec) -> SelectionSettings:
    from tandemkv.cache_rank.policies.registry import resolve_selection  # policies need torch

    queries = queries_file(model, selection.declared.layers_ahead)
    if not selection.declared.predictor and queries.is_file():
        values = selection.model_dump(exclude_unset=True, exclude={"declared"})
        values["options"] = {**selection.options, "predictor": str(queries)}
        selection = resolve_selection(values)
    if not selection.declared.predictor:  # what channels lose, fitted queries win back
        return selection
    channels = channels_file(model)
    if selection.index_dtype != "native" and not selection.index_channels and channels.is_file():
        selection = selection.model_copy(update={"index_channels": str(channels)})
    return selection
