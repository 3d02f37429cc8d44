# SPDX-License-Identifier: Apache-2.0
"""A calibration for policy sync_kv."""

from __future__ import annotations

from pathlib import Path

from tandemkv.cache_rank.calibration.format import (
    FORMAT_VERSION,
    CalibratedModel,
    Calibration,
    SyncKVCalibration,
    write_calibration,
)
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec


def write_clusters(model: Path, out: Path) -> Path:
    """Write one in which the first KV head of a layer stands for all of them; returns `out`."""
    spec = read_model_spec(model, dtype="float32")
    heads = SyncKVCalibration(
        clusters=((0,) * spec.num_kv_heads,) * spec.num_layers,
        representatives=((0,),) * spec.num_layers,
    )
    found = Calibration(
        version=FORMAT_VERSION, policy="sync_kv", source="measured", sync_kv=heads,
        model=CalibratedModel.of(spec, model.name),
    )  # fmt: skip
    write_calibration(found, out)
    return out
