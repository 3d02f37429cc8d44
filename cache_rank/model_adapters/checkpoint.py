# SPDX-License-Identifier: Apache-2.0
"""Read single tensors of a model directory, sharded or not, without the rest."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError

_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The safetensors of a model directory; a context manager, files are opened when needed."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def __enter__(self) -> Self:
        index = self._model_dir / _INDEX
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._names = {str(name): str(file) for name, file in weight_map.items()}
            return self
        for path in sorted(self._model_dir.glob("*.safetensors")):
            self._names.update(dict.fromkeys(self._open(path.name).keys(), path.name))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU.

        Raises
        ------
        UnsupportedModelError
            If the checkpoint has no tensor of that name.
        """
        file = self._names.get(name)
        if file is None:
            raise UnsupportedModelError(
                f"model={self._model_dir}: no tensor {name} in its safetensors; policy look_ahead "
                "needs the unquantised weights of q_proj and the norms"
            )
        tensor: torch.Tensor = self._open(file).get_tensor(name)
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._model_dir / Path(file).name
            self._files[file] = self._stack.enter_context(
                safe_open(path, framework="pt", device="cpu")
            )
        return self._files[file]
