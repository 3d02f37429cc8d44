# SPDX-License-Identifier: Apache-2.0
"""Tensors in a model's safetensors: headers of many, and parts of single ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """What a header says of a tensor."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, ``BF16`` for example."""

    def check(self, *shapes: tuple[int, ...]) -> None:
        """Require one of `shapes`.

        Raises `UnsupportedModelError`, naming the file, the tensor and both shapes.
        """
        if self.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise UnsupportedModelError(
                f"{self.path}: {self.name} has shape {list(self.shape)}, config.json means "
                f"{wanted}; copy or download both again"
            )

    def read(self, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Return the tensor as it is stored, on the CPU; or some rows, or some columns.

        Raises `UnsupportedModelError` if the file cannot be read.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                if columns is not None:
                    found: Any = file.get_slice(self.name)[:, columns.start : columns.stop]
                elif rows is not None:
                    found = file.get_slice(self.name)[rows.start : rows.stop]
                else:
                    found = file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.path, error) from error
        result: torch.Tensor = found
        return result


def read_headers(model_dir: Path, part: str) -> dict[str, StoredTensor]:
    """Return the tensors of a model whose names have `part` in them; no weight is read.

    Raises `UnsupportedModelError` if a file cannot be read.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if part in name:
                        header = file.get_slice(name)
                        found[name] = StoredTensor(
                            name=name,
                            path=path,
                            shape=tuple(header.get_shape()),
                            dtype=str(header.get_dtype()),
                        )
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error
    return found


def _files(model_dir: Path) -> list[Path]:
    """Return the files that SGLang loads: those of the index, if there is one."""
    index = model_dir / _INDEX
    if not index.is_file():
        return sorted(model_dir.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(model_dir / name for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(index, error) from error


def _unreadable(path: Path, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: cannot be read ({type(error).__name__}: {error}); copy or download it again"
    )
