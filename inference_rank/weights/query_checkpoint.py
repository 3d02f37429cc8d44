# SPDX-License-Identifier: Apache-2.0
"""``W_q`` of each layer from a model's safetensors, where the module in memory cannot be read.

SGLang's kernels for quantised matrices repack them after loading, each in its own way and some with
a loss. The files have them as they were made. The inference rank reads them once at its start;
the checks before a start read their headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.models.architectures import SEE_DOCS, Architecture
from tandemkv.cache_rank.protocol.models.model_spec import (
    ModelSpec,
    architecture_of_config,
    read_config,
    read_model_spec,
)
from tandemkv.cache_rank.protocol.models.weight_formats import WeightFormat, read_weight_format
from tandemkv.inference_rank.sglang.versions import resolved

from .dequantize import dequantize_fp8
from .packed_weights import LAYOUTS, check_packed, read_packed
from .stored_tensors import StoredTensor, read_headers

WITHOUT_PREDICTION = (
    "serve with a policy that predicts no query from the residual stream (--policy exact, "
    f"streaming, last_query or quest), or another checkpoint of the model ({SEE_DOCS})"
)
LOADED_FROM_SAFETENSORS = ("auto", "safetensors")
"""Values of SGLang's ``--load-format``."""
_FLOATS = ("F16", "BF16", "F32", "F64")
_FP8 = "F8_E4M3"


class QueryCheckpoint:
    """The rows of q in the files of a model, in every format that can be read.

    `model_dir` has ``config.json`` and safetensors in Hugging Face's names. Nothing is read before
    it is asked for.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    @property
    def format_name(self) -> str:
        """Format of the quantised matrices, for messages."""
        return "none" if self._weights is None else self._weights.method

    @property
    def num_query_rows(self) -> int:
        """Rows of W_q: all query heads of the model, and their gates if it has some."""
        per_query = 2 if self._entry.gates_heads else 1
        return per_query * self._spec.num_qo_heads * self._spec.head_dim

    def check(self) -> None:
        """Refuse what `weight` would, from headers alone.

        Raises `UnsupportedModelError`, naming the format or the tensor, with the reason and what to
        do.
        """
        for layer in sorted(set(range(self._spec.num_layers)) - set(self._spec.linear_layers)):
            self._check_layer(self._parts(layer))

    def weight(
        self, layer: int, rows: range, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return rows ``[len(rows), hidden_size]`` of ``W_q``.

        `rows` are of all query heads, for example those of a tensor-parallel rank. The result has
        `dtype`, see `tandemkv.inference_rank.weights.dequantize`, and is worked out on `device`.
        Raises `UnsupportedModelError` if the format is not known, or a tensor is missing or has
        another shape.
        """
        parts = self._parts(layer)
        self._check_layer(parts)
        stored = parts.get("weight")
        if stored is None:
            shape = (self._num_stored_rows, self._spec.hidden_size)
            try:
                return read_packed(
                    parts, self._checked_format(), rows, shape=shape, dtype=dtype, device=device
                )
            except ValueError as error:
                raise self._refusal(str(error)) from error
        found = stored.read(rows).to(device)
        if stored.dtype != _FP8:
            return found.to(dtype)
        scale = _scale_of(parts).read().to(device)
        block = self._checked_format().block
        return dequantize_fp8(found, scale, first_row=rows.start, block=block, dtype=dtype)

    def bias(
        self, layer: int, rows: range, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return rows of the bias ``[len(rows)]``; arguments and errors as of `weight`."""
        parts = self._parts(layer)
        stored = parts.get("bias")
        if stored is None:
            raise self._refusal(f"it has no {self._prefix(layer)}.bias, and SGLang's module has")
        stored.check((self._num_stored_rows,))
        return stored.read(rows).to(device=device, dtype=dtype)

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return read_config(self._model_dir)

    @cached_property
    def _spec(self) -> ModelSpec:
        return read_model_spec(self._model_dir, dtype="float32")  # heads and sizes alone are read

    @cached_property
    def _entry(self) -> Architecture:
        return architecture_of_config(self._config)

    @cached_property
    def _weights(self) -> WeightFormat | None:
        return read_weight_format(self._model_dir, self._config)

    @property
    def _num_stored_rows(self) -> int:
        own, others = self.num_query_rows, 2 * self._spec.num_kv_heads * self._spec.head_dim
        return own + (others if self._entry.fused_qkv else 0)

    def _prefix(self, layer: int) -> str:
        name = "qkv_proj" if self._entry.fused_qkv else "q_proj"
        return f"{self._entry.tensor_prefix}layers.{layer}.self_attn.{name}"

    def _parts(self, layer: int) -> dict[str, StoredTensor]:
        """Return what the files have of a layer's projection, by the end of its name."""
        prefix = self._prefix(layer) + "."
        found = {
            name.removeprefix(prefix): stored
            for name, stored in self._tensors.items()
            if name.startswith(prefix)
        }
        if not found:
            raise self._refusal(f"it has no tensor {prefix}weight")
        return found

    def _check_layer(self, parts: Mapping[str, StoredTensor]) -> None:
        stored = parts.get("weight")
        if stored is not None and stored.dtype in _FLOATS:  # the format is of other matrices
            stored.check((self._num_stored_rows, self._spec.hidden_size))
            return
        found = self._checked_format()
        layout = LAYOUTS.get(found.packing)
        if found.packing == "fp8" and stored is not None and stored.dtype == _FP8:
            self._check_fp8(parts, stored)
        elif layout is not None and layout.codes in parts and stored is None:
            try:
                check_packed(parts, found, self._num_stored_rows, self._spec.hidden_size)
            except ValueError as error:
                raise self._refusal(str(error)) from error
        else:
            names = ", ".join(f"{part.name} ({part.dtype})" for part in parts.values())
            raise self._refusal(f"it has {names}, which is another layout")

    def _checked_format(self) -> WeightFormat:
        if self._weights is None:
            raise self._refusal("config.json has no quantization_config that says what it is")
        if self._weights.reason:
            raise self._refusal(self._weights.reason)
        return self._weights

    def _check_fp8(self, parts: Mapping[str, StoredTensor], stored: StoredTensor) -> None:
        num_rows, num_columns = self._num_stored_rows, self._spec.hidden_size
        stored.check((num_rows, num_columns))
        if not {"weight_scale_inv", "weight_scale"} & set(parts):
            raise self._refusal(f"{stored.name} has no weight_scale_inv or weight_scale beside it")
        scale, block = _scale_of(parts), self._checked_format().block
        if scale.dtype not in _FLOATS:
            raise self._refusal(f"{scale.name} has dtype {scale.dtype}, which is not read")
        if block is None:
            scale.check((), (1,), (num_rows,), (num_rows, 1))
        else:
            scale.check((-(-num_rows // block[0]), -(-num_columns // block[1])))

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return read_headers(self._model_dir, ".self_attn.")

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"model={self._model_dir.name}, quantisation={self.format_name}: queries cannot be "
            f"predicted from its W_q: {reason}; {WITHOUT_PREDICTION}"
        )


def checkpoint_of(runner: Any) -> QueryCheckpoint | None:
    """Return the files of the model of SGLang's ModelRunner; None if it was loaded from others."""
    if str(resolved(runner.server_args).load_format) not in LOADED_FROM_SAFETENSORS:
        return None
    return QueryCheckpoint(Path(runner.model_config.model_path))


def _scale_of(parts: Mapping[str, StoredTensor]) -> StoredTensor:
    found = parts.get("weight_scale_inv")
    return parts["weight_scale"] if found is None else found
