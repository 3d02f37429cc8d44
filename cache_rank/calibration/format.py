# SPDX-License-Identifier: Apache-2.0
"""The calibration file: JSON, versioned, of one model and one policy."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.frozen_model import FrozenModel

FORMAT_VERSION = 1
MAX_FILE_BYTES = 16 << 20


class CalibrationError(SettingsError):
    """A calibration cannot be made, read, or used with this model; the text says what to do."""


class CalibratedModel(FrozenModel):
    """The model that was measured.

    `model_hash` is `tandemkv.cache_rank.protocol.models.model_spec.model_hash`: of
    ``config.json`` and of name, size, first and last MiB of each weight file; absent if the
    figures are from a paper.
    """

    model_id: str = Field(min_length=1, max_length=256)
    model_hash: str | None = None
    architecture: str
    num_layers: int = Field(ge=1)
    num_qo_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    hidden_size: int = Field(ge=1)

    @classmethod
    def of(cls, model: ModelSpec, model_id: str) -> Self:
        """Describe `model`."""
        names = cls.model_fields.keys() - {"model_id"}
        return cls(model_id=model_id, **{name: getattr(model, name) for name in names})

    def has_shape_of(self, model: ModelSpec) -> bool:
        """Whether architecture and shape are those of `model`."""
        mine = self.model_dump(exclude={"model_id", "model_hash"})
        return all(getattr(model, name) == value for name, value in mine.items())


class KascadeCalibration(FrozenModel):
    """Anchors, ascending from layer 0, and for each layer the anchor's head of each KV head.

    ``similarity`` (Eq. 3, weighted by importance) and ``importance`` are kept for inspection;
    empty if the anchors are from a paper.
    """

    anchors: tuple[int, ...] = Field(min_length=1)
    head_maps: tuple[tuple[int, ...], ...]
    top_k: int = Field(default=64, ge=1)
    importance: tuple[float, ...] = ()
    similarity: tuple[tuple[float, ...], ...] = ()


class SyncKVCalibration(FrozenModel):
    """For each layer the cluster of each KV head, and the representative head of each cluster."""

    clusters: tuple[tuple[int, ...], ...]
    representatives: tuple[tuple[int, ...], ...]
    top_k: int = Field(default=64, ge=1)


class Corpus(FrozenModel):
    """The text that was read: names of its sources, and their size in tokens."""

    sources: tuple[str, ...]
    num_texts: int = Field(ge=0)
    num_tokens: int = Field(ge=0)


class Calibration(FrozenModel):
    """One calibration file. `source` tells a measurement from figures printed in a paper."""

    format: Literal["tandemkv-calibration"] = "tandemkv-calibration"
    version: int
    policy: Literal["kascade", "sync_kv"]
    source: Literal["measured", "paper"]
    reference: str = ""
    model: CalibratedModel
    corpus: Corpus | None = None
    kascade: KascadeCalibration | None = None
    sync_kv: SyncKVCalibration | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.version != FORMAT_VERSION:
            raise ValueError(
                f"version={self.version} is not {FORMAT_VERSION}; run `tandemkv calibrate` again"
            )
        for name in ("kascade", "sync_kv"):
            if (getattr(self, name) is not None) != (name == self.policy):
                raise ValueError(
                    f"policy={self.policy} needs the section of that name, and no other"
                )
        layers, heads = self.model.num_layers, self.model.num_kv_heads
        if self.kascade is not None:
            _check_anchors(self.kascade.anchors, layers)
            _check_table("head_maps", self.kascade.head_maps, layers, heads, heads)
        if self.sync_kv is not None:
            _check_table("clusters", self.sync_kv.clusters, layers, heads, heads)
            _check_clusters(self.sync_kv, layers, heads)
        return self


def _check_anchors(anchors: tuple[int, ...], num_layers: int) -> None:
    ascending = list(anchors) == sorted(set(anchors))
    if not ascending or anchors[0] < 0 or anchors[-1] >= num_layers:
        raise ValueError(f"anchors={anchors} must be ascending layers below {num_layers}")


def _check_table(
    name: str, table: tuple[tuple[int, ...], ...], num_layers: int, width: int, limit: int
) -> None:
    if len(table) != num_layers:
        raise ValueError(f"{name} has {len(table)} layers, the model {num_layers}")
    for layer, row in enumerate(table):
        if len(row) != width or not all(0 <= value < limit for value in row):
            raise ValueError(f"{name}[{layer}]={row} must be {width} numbers below {limit}")


def _check_clusters(found: SyncKVCalibration, num_layers: int, num_heads: int) -> None:
    if len(found.representatives) != num_layers:
        raise ValueError(
            f"representatives has {len(found.representatives)} layers, the model {num_layers}"
        )
    for layer, (clusters, leaders) in enumerate(
        zip(found.clusters, found.representatives, strict=True)
    ):
        own = [clusters[head] for head in leaders if 0 <= head < num_heads]
        if own != list(range(len(leaders))) or set(clusters) != set(own):
            raise ValueError(
                f"representatives[{layer}]={leaders} must name one head of each cluster of "
                f"{clusters}, in order"
            )


def read_calibration(path: Path) -> Calibration:
    """Read and check a calibration file.

    Raises `CalibrationError` if it cannot be read, or is not a calibration of this version.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CalibrationError(f"calibration={path}: {size} bytes are too many for one")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"calibration={path}: cannot be read ({error}); give the file that "
            "`tandemkv calibrate` wrote"
        ) from error
    return parse_calibration(text, str(path))


def parse_calibration(text: str, name: str) -> Calibration:
    """Check the text of a calibration file called `name`.

    Raises `CalibrationError` if it is not one of this version.
    """
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise CalibrationError(
            f"calibration={name}: {where}: {first['msg']}; make a new one with `tandemkv calibrate`"
        ) from error


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration file, whole or not at all.

    Raises `CalibrationError` if the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(calibration.model_dump_json(exclude_none=True) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CalibrationError(f"out={path}: cannot be written ({error})") from error
    finally:
        with contextlib.suppress(OSError):  # where nothing could be written there is nothing
            temporary.unlink()
