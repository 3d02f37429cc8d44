# SPDX-License-Identifier: Apache-2.0
"""Safetensors files that ``tandemkv calibrate`` makes of one model, and whether one fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from tandemkv.cache_rank.protocol.errors import SettingsError

from .model_spec import ModelSpec

if TYPE_CHECKING:  # plans and checks before a start need no torch
    import torch

logger = logging.getLogger(__name__)

_VERSION = "1"
_SHAPE = ("architecture", "num_layers", "num_qo_heads", "head_dim", "hidden_size")


class FittedFile:
    """A file that a setting names; nothing but its header is read before tensors are asked for.

    Parameters
    ----------
    setting : str
        That names it, for errors.
    path : Path
        A file of `write_fitted_file`.
    how : str
        The command that makes one.

    Attributes
    ----------
    about : dict
        What is noted in the header.
    shapes : dict
        Of its tensors, by name.

    Raises
    ------
    SettingsError
        If it cannot be read.
    """

    def __init__(self, setting: str, path: Path, how: str) -> None:
        self._name, self._path, self._how = f"{setting}={path}", path, how
        try:
            with safe_open(path, framework="pt") as file:
                self.about = dict(file.metadata() or {})
                self.shapes = {x: tuple(file.get_slice(x).get_shape()) for x in file.keys()}  # noqa: SIM118 (no dict)
        except (OSError, SafetensorError) as error:
            raise SettingsError(
                f"{self._name}: cannot be read ({error}); make it with {how}"
            ) from error

    def check(self, model: ModelSpec, kind: str, others: Mapping[str, str]) -> None:
        """Refuse a file that is not of this kind, shape of model and `others` of its header.

        Other weights of the same shape are told of only, and not if the model has no hash, where
        its weights are not at hand. Raises `SettingsError`.
        """
        for name, wanted in {**_about(model, kind), **others}.items():
            found = self.about.get(name, "not told")
            if name == "model_hash":
                if wanted and found != wanted:
                    logger.warning("%s was fitted to other weights of this shape", self._name)
            elif found != wanted:
                raise SettingsError(
                    f"{self._name}: {name} is {found}, and {wanted} is served; make one with "
                    f"{self._how}"
                )

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a file whose tensor `name` is not of `shape`; raises `SettingsError`."""
        found = self.shapes.get(name)
        if found != shape:
            raise SettingsError(
                f"{self._name}: {name} is {found}, not {shape}; make the file again"
            )

    def rows(self, name: str, rows: range) -> torch.Tensor:
        """Return consecutive rows of a tensor. Raises `SettingsError` if it has fewer."""
        (count, *_) = self.shapes.get(name, (0,))
        if rows.stop > count:
            raise SettingsError(
                f"{self._name}: {name} has {count} rows, and those up to "
                f"{rows.stop} are asked for; make one for this model with {self._how}"
            )
        with safe_open(self._path, framework="pt") as file:
            found: torch.Tensor = file.get_slice(name)[rows.start : rows.stop]
        return found


def write_fitted_file(
    path: Path,
    model: ModelSpec,
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    about: Mapping[str, str],
) -> None:
    """Write tensors; `about` is noted beside what the file is of.

    Raises `SettingsError` if a file cannot be written there.
    """
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={**about, **_about(model, kind)})
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"out={path}: cannot be written ({error})") from error


def _about(model: ModelSpec, kind: str) -> dict[str, str]:
    shape = {name: str(getattr(model, name)) for name in _SHAPE}
    return {"format": kind, "version": _VERSION, "model_hash": model.model_hash, **shape}
