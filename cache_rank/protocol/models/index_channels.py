# SPDX-License-Identifier: Apache-2.0
"""Which channels of its keys an index has, where it has not all of them.

A query meets a key in a few channels for the most part, and in which ones is a matter of the
layer and head, not of the text (Double Sparsity, Yang et al., arXiv:2408.07092). A safetensors file
of one model, made by ``tandemkv calibrate --index-channels R``
(`tandemkv.server.evaluation.calibrate.index_channels` says how), has ``layers.{l}`` ``[H, R]``
int32 for each layer that attends to the whole context: the channels of each KV head, after rotation
and norm, in rising order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .fitted_file import FittedFile, write_fitted_file
from .model_spec import ModelSpec

if TYPE_CHECKING:  # plans and checks before a start need no torch
    import torch

FORMAT = "tandemkv-index-channels"
STEP = 32
"""R is a multiple of it: kernels multiply by halves of 16 channels."""


def indexed_layers(model: ModelSpec) -> list[int]:
    """Layers with channels: those that attend to the whole context."""
    return [x for x in range(model.num_layers) if x not in model.other_layers]


def read_index_channels(
    selection: SelectionSettings, layers: Iterable[int], heads: range
) -> dict[int, torch.Tensor]:
    """Return ``[len(heads), R]`` int64 for each of `layers`; none without a file.

    `heads` are KV heads of the whole model. A layer that the file lacks has those of another: only
    an engine that is measured has one, and takes as long with any. Raises `SettingsError` if the
    file cannot be read, or names channels that there are not.
    """
    if selection.index_channels is None:
        return {}
    file = _open(selection.index_channels)
    any_layer = next(iter(file.shapes), "")
    names = {x: name if (name := f"layers.{x}") in file.shapes else any_layer for x in layers}
    found = {layer: file.rows(name, heads).long() for layer, name in names.items()}
    size = int(file.about.get("head_dim", "0"))
    for layer, channels in found.items():  # no kernel looks whether a query has them
        if channels.min() < 0 or channels.max() >= size:
            raise SettingsError(
                f"index_channels={selection.index_channels}: layers.{layer} names channels that "
                f"keys of {size} do not have; make the file again"
            )
    return found


def check_index_channels(selection: SelectionSettings, model: ModelSpec) -> None:
    """Refuse a file that is none, or not of `model`, the whole one; raises `SettingsError`."""
    if selection.index_channels is None:
        return
    file = _open(selection.index_channels)
    file.check(model, FORMAT, {"num_kv_heads": str(model.num_kv_heads)})
    count = _count(file)
    for layer in indexed_layers(model):
        file.check_shape(f"layers.{layer}", (model.num_kv_heads, count))


def num_index_channels(selection: SelectionSettings) -> int | None:
    """Return R, None without a file. Raises `SettingsError` if the file cannot be read."""
    return None if selection.index_channels is None else _count(_open(selection.index_channels))


def write_index_channels(
    path: Path, model: ModelSpec, layers: Mapping[int, torch.Tensor], about: Mapping[str, str]
) -> None:
    """Write ``[H, R]`` for each of `indexed_layers`; `about` is noted beside what the file is of.

    Raises `SettingsError` if a file cannot be written there.
    """
    (count,) = {len(channels[0]) for channels in layers.values()}
    own = {"num_kv_heads": str(model.num_kv_heads), "num_channels": str(count)}
    tensors = {f"layers.{layer}": found.int() for layer, found in layers.items()}
    write_fitted_file(path, model, FORMAT, tensors, {**about, **own})


def _count(file: FittedFile) -> int:
    return int(file.about.get("num_channels", "0"))


def _open(path: str) -> FittedFile:
    how = "`tandemkv calibrate MODEL --index-channels R --out FILE`"
    return FittedFile("index_channels", Path(path).expanduser(), how)
