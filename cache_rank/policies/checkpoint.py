# SPDX-License-Identifier: Apache-2.0
"""Weights of a selector that a model, or a folder beside it, brings."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .options import PolicyError


class Checkpoint:
    """The safetensors of a folder, read by name.

    `folder` holds one or more ``.safetensors``. Nothing is read before the first tensor is asked
    for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tensor(
        self,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return one tensor, in `dtype` on `device` (the CPU by default).

        Raises `PolicyError` if it is not there, has another shape, or its file cannot be read.
        """
        path = self._files.get(name)
        if path is None:
            raise PolicyError(
                f"{self._folder}: no safetensors file holds {name}; use a checkpoint that was "
                "trained for this policy, or another --policy"
            )
        try:
            with safe_open(path, framework="pt") as file:
                found: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"{path}: {name} cannot be read ({error})") from error
        if tuple(found.shape) != shape:
            raise PolicyError(
                f"{path}: {name} is {tuple(found.shape)}, and this model and policy need {shape}"
            )
        return found.to(device=device, dtype=dtype)

    def layers(
        self,
        template: str,
        layers: Iterable[int],
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> dict[int, torch.Tensor]:
        """Return a tensor for each of `layers`; `template` has ``{layer}`` in its name.

        Raises `PolicyError` as `tensor` does.
        """
        return {
            layer: self.tensor(
                template.format(layer=layer), shape=shape, dtype=dtype, device=device
            )
            for layer in layers
        }

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Which file holds which tensor."""
        found: dict[str, Path] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    found |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise PolicyError(f"{path}: cannot be read ({error})") from error
        return found
