# SPDX-License-Identifier: Apache-2.0
"""``W_q`` of a decoder layer: from SGLang's module, or from the files if that is quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.models.fitted_queries import FittedQueries
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.weights.dequantize import dequantize_fp8
from tandemkv.inference_rank.weights.query_checkpoint import WITHOUT_PREDICTION, QueryCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlace:
    """Where a rank predicts, and what of the model it has."""

    num_heads: int
    head_dim: int
    """Query heads of this rank, and their size."""
    device: torch.device
    is_int8: bool = False
    """Whether to keep W_q in int8, where the whole prediction is one operation."""
    dtype: torch.dtype = torch.float32
    """Of hidden states, and so of a W_q that the model has in a quantised form only."""
    checkpoint: QueryCheckpoint | None = None
    """Where such a W_q is read from. None where the model was not loaded from its safetensors."""
    fitted: FittedQueries | None = None
    """Projections that predict better, for the layers that it has."""

    @property
    def width(self) -> int:
        """Elements of a layer's query."""
        return self.num_heads * self.head_dim


def read_projection(
    name: str, layer: int, attention: Any, place: QueryPlace
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``W_q [num_heads * head_dim, hidden_size]`` and its bias, the rows of this rank.

    An unquantised module's are views of its tensors, or a copy where a gate's rows lie behind those
    of each head. What is quantised is read from the checkpoint and dequantised here, once. Where
    SGLang has loaded no files (``--load-format dummy``), the module's float8 blocks are
    dequantised, the one layout that its kernels leave as it was. A layer that ``place.fitted`` has
    is read from there, whatever the module has, and then the others have a bias too. `name` and
    `layer` are for errors, and in the files; `attention` is what of the layer attends
    (`attention_of`). Both are of the module's dtype on its device, or of ``place.dtype`` on
    ``place.device`` if dequantised.

    Raises `ContractError` if there is no projection or its layout is not known, and
    `UnsupportedModelError` if the checkpoint's is not.
    """
    projection = getattr(attention, "qkv_proj", None)
    projection = getattr(projection, "base_layer", projection)  # under LoRA adapters
    weight = getattr(projection, "weight", None)
    has_weight = weight is not None or getattr(projection, "quant_method", None) is not None
    if not has_weight or not hasattr(attention, "rotary_emb"):
        raise ContractError(
            f"{name} has no self_attn.qkv_proj.weight or rotary_emb; look_ahead cannot read "
            "its query projection"
        )
    if place.fitted is not None:
        rows = rows_of(name, place.fitted.num_query_rows, place.width)
        fitted = place.fitted.layer(layer, rows, dtype=place.dtype, device=place.device)
        if fitted is not None:
            return fitted
    found, bias = _own_projection(name, layer, attention, projection, place)
    if bias is None and place.fitted is not None:  # as the layers have that it has
        bias = torch.zeros(place.width, dtype=place.dtype, device=place.device)
    return found, bias


def _own_projection(
    name: str, layer: int, attention: Any, projection: Any, place: QueryPlace
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return W_q and its bias of a layer's `projection`; see `read_projection`."""
    weight = getattr(projection, "weight", None)
    # Rows of each head in its order: the query's, then as many of its gate.
    per_query = 2 if getattr(attention, "attn_output_gate", False) else 1
    bias = getattr(projection, "bias", None)
    num_rows = per_query * place.width
    if per_query > 1 and bias is not None:
        raise ContractError(f"{name} has a bias of its queries and gates (see docs/models.md)")
    own = None if bias is None else bias.detach()[:num_rows]
    if weight is not None and weight.is_floating_point() and weight.element_size() >= 2:
        if getattr(projection, "use_intel_amx_backend", False):
            raise ContractError(
                f"{name}: SGLang has packed qkv_proj for AMX, and look_ahead cannot read it; use "
                "--dtype float32, which SGLang leaves as it is"
            )
        return _without_gates(weight.detach()[:num_rows], place, per_query), own
    if place.checkpoint is None:
        found = _live_blocks(name, projection, place, num_rows)
        return _without_gates(found, place, per_query), own
    rows, where = rows_of(name, place.checkpoint.num_query_rows, num_rows), place.device
    if own is not None:  # kernels permute a bias with its matrix
        own = place.checkpoint.bias(layer, rows, dtype=place.dtype, device=where)
    found = place.checkpoint.weight(layer, rows, dtype=place.dtype, device=where)
    return _without_gates(found, place, per_query), own


def _without_gates(rows: torch.Tensor, place: QueryPlace, per_query: int) -> torch.Tensor:
    """Return W_q of ``rows [per_query * width, hidden]``; a copy, if gates are left out."""
    if per_query == 1:
        return rows
    return rows.view(place.num_heads, per_query, place.head_dim, -1)[:, 0].flatten(0, 1)


def rows_of(name: str, total: int, width: int, what: str = "query rows") -> range:
    """Return which of the `total` rows of all query heads this tensor-parallel rank has."""
    rank = 0
    if total != width:
        rank, num_ranks = sglang_versions.tensor_rank(), sglang_versions.tensor_size()
        if num_ranks * width != total:
            raise ContractError(
                f"{name}: {num_ranks} ranks of {width} {what} are not the {total} of the model "
                "(see docs/models.md)"
            )
    return range(rank * width, (rank + 1) * width)


def _live_blocks(name: str, projection: Any, place: QueryPlace, num_rows: int) -> torch.Tensor:
    """Dequantise float8 blocks ``[rows, columns]`` of a module, whose first rows are q's."""
    weight = getattr(projection, "weight", None)
    method = getattr(projection, "quant_method", None)
    block = getattr(method, "weight_block_size", None)
    scale = getattr(projection, "weight_scale_inv", None)
    if weight is None or weight.dtype != torch.float8_e4m3fn or block is None or scale is None:
        kind = "packed" if weight is None else str(weight.dtype)
        raise ContractError(
            f"{name}: qkv_proj is quantised ({kind}), and SGLang has not loaded it from "
            "safetensors that W_q could be read from: use --load-format auto, or "
            f"{WITHOUT_PREDICTION}"
        )
    rows, columns = weight.shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    is_plain = scale.dtype == torch.float32 and not getattr(scale, "format_ue8m0", False)
    is_packed = getattr(projection, "use_intel_amx_backend", False)
    if tuple(scale.shape) != blocks or not is_plain or is_packed:
        raise ContractError(
            f"{name}: SGLang has repacked the float8 blocks of qkv_proj (scales "
            f"{list(scale.shape)}, {scale.dtype}); {WITHOUT_PREDICTION}"
        )
    return dequantize_fp8(
        weight.detach()[:num_rows],
        scale.detach(),
        first_row=0,
        block=(int(block[0]), int(block[1])),
        dtype=place.dtype,
    )
