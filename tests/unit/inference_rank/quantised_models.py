# SPDX-License-Identifier: Apache-2.0
"""Quantised versions of the tiny random models, and what they mean in float64.

Packing is done here one number at a time, by the formats' definitions; reading them is tested with
it, and shares no code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_model

Parts = dict[str, torch.Tensor]
"""Tensors of a matrix, by the ends of their names."""
_LINEAR = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each four bits of a word, from the lowest."""


class Quantised(NamedTuple):
    """A matrix as a checkpoint has it, and the numbers that it stands for, in float64."""

    parts: Parts
    meaning: torch.Tensor


def fp8(matrix: torch.Tensor, block: tuple[int, int] | None = None) -> Quantised:
    """Quantise in blocks, which may be cut off at the ends, or with one scale in all."""
    rows, columns = matrix.shape
    height, width = block or (rows, columns)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // height), -(-columns // width))
    meaning = torch.empty(rows, columns, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale = matrix[part].abs().max().float() / 448
            codes[part] = (matrix[part].float() / scale).to(torch.float8_e4m3fn)
            scales[i, j] = scale
            meaning[part] = codes[part].double() * scale.double()
    if block is None:
        return Quantised({"weight": codes, "weight_scale": scales[0, 0]}, meaning)
    return Quantised({"weight": codes, "weight_scale_inv": scales}, meaning)


def fp8_channels(matrix: torch.Tensor) -> Quantised:
    """Quantise with a scale for each row, as compressed-tensors names them."""
    parts, meaning = fp8(matrix, (1, matrix.shape[1]))
    return Quantised(
        {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, meaning
    )


def _to_integers(
    matrix: torch.Tensor, groups: np.ndarray, bits: int, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes ``[columns, rows]``, zero points and float16 scales ``[groups, rows]``."""
    source, top = matrix.double().numpy().T, (1 << bits) - 1
    count, middle = groups.max() + 1, 1 << (bits - 1)
    scales = np.empty((count, source.shape[1]), dtype=np.float16)
    zeros = np.full(scales.shape, middle, dtype=np.int64)
    codes = np.empty(source.shape, dtype=np.int64)
    for group in range(count):
        part = source[groups == group]
        low, high = part.min(0), part.max(0)
        if symmetric:
            scales[group] = np.maximum(high, -low) / (middle - 1)
        else:
            scales[group] = (high - low) / top
            zeros[group] = np.clip(np.round(-low / scales[group]), 1, top)
        codes[groups == group] = np.clip(
            np.round(part / scales[group].astype(np.float64)) + zeros[group], 0, top
        )
    return codes, zeros, scales


def _words(values: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Pack the columns of `values` into words of 32 bits, those of a word in `order`."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        part = values[:, order[place] :: per_word].astype(np.uint32)
        words |= part << np.uint32(place * bits)
    return words.view(np.int32)


def _meaning(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> torch.Tensor:
    return torch.from_numpy(((codes - zeros[groups]) * scales[groups].astype(np.float64)).T.copy())


def awq(matrix: torch.Tensor, group_size: int = 32) -> Quantised:
    """Quantise to 4 bits in groups of columns, as AutoAWQ's version gemm."""
    groups = np.arange(matrix.shape[1]) // group_size
    codes, zeros, scales = _to_integers(matrix, groups, 4, symmetric=False)
    parts = {
        "qweight": torch.from_numpy(_words(codes, 4, _AWQ_ORDER)),
        "qzeros": torch.from_numpy(_words(zeros, 4, _AWQ_ORDER)),
        "scales": torch.from_numpy(scales),
    }
    return Quantised(parts, _meaning(codes, zeros, scales, groups))


def gptq(
    matrix: torch.Tensor,
    group_size: int = 32,
    *,
    bits: int = 4,
    symmetric: bool = True,
    sorted_columns: bool = False,
    stored_less: int = 1,
) -> Quantised:
    """Quantise in groups of columns, which are in no order with `sorted_columns` (desc_act)."""
    num_columns = matrix.shape[1]
    groups = np.arange(num_columns) // group_size
    if sorted_columns:
        groups = groups[np.random.default_rng(num_columns).permutation(num_columns)]
    codes, zeros, scales = _to_integers(matrix, groups, bits, symmetric=symmetric)
    order = tuple(range(32 // bits))
    parts = {
        "qweight": torch.from_numpy(_words(codes.T, bits, order).T.copy()),
        "qzeros": torch.from_numpy(_words(zeros - stored_less, bits, order)),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Quantised(parts, _meaning(codes, zeros, scales, groups))


def compressed(matrix: torch.Tensor, *, bits: int = 4, symmetric: bool = True) -> Quantised:
    """Quantise in groups of 32 columns, packed as compressed-tensors does."""
    groups = np.arange(matrix.shape[1]) // 32
    codes, zeros, scales = _to_integers(matrix, groups, bits, symmetric=symmetric)
    order = tuple(range(32 // bits))
    parts = {
        "weight_packed": torch.from_numpy(_words(codes.T, bits, order)),
        "weight_scale": torch.from_numpy(scales.T.copy()),
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(_words(zeros, bits, order).T.copy())
    return Quantised(parts, _meaning(codes, zeros, scales, groups))


class QuantisedModel(NamedTuple):
    """A tiny model by its name, how its matrices are quantised, and what ``config.json`` says."""

    base: str
    quantise: Callable[[torch.Tensor], Quantised]
    says: Mapping[str, Any]


BLOCK = (16, 16)
"""Square and a divisor of head_dim, or SGLang pads heads on a CPU."""
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                "dynamic": True,
            },
        }
    },
}  # fmt: skip
_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                "symmetric": True,
            },
        }
    },
}  # fmt: skip
MODELS = {
    "fp8-blocks": QuantisedModel(
        "qwen3", lambda matrix: fp8(matrix, BLOCK), {**_FP8, "weight_block_size": list(BLOCK)}
    ),
    "gptq-fused": QuantisedModel("phi-4", gptq, _GPTQ),
    "fp8-tensors": QuantisedModel("qwen2", fp8, _FP8),
    "fp8-channels": QuantisedModel("qwen3", fp8_channels, _CHANNELS),
    "awq": QuantisedModel("qwen3", awq, _AWQ),
    "gptq": QuantisedModel("qwen2", gptq, _GPTQ),
    "gptq-sorted": QuantisedModel(
        "glm4",
        lambda matrix: gptq(matrix, symmetric=False, sorted_columns=True),
        {**_GPTQ, "sym": False, "desc_act": True},
    ),
    "compressed": QuantisedModel("qwen3", compressed, _PACKED),
}


def write_quantised(name: str, folder: Path, plain: Path) -> None:
    """Write a quantised model, and one in float64 with the numbers that its matrices stand for."""
    base, quantise, says = MODELS[name]
    write_model(base, folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    stored: Parts = {}
    for key, tensor in tensors.items():
        match = _LINEAR.fullmatch(key)
        if match is None:
            stored[key], meant[key] = tensor, tensor.double()
            continue
        parts, meant[key] = quantise(tensor.double())
        stored |= {f"{match[1]}.{end}": part.contiguous() for end, part in parts.items()}
    config = json.loads((folder / "config.json").read_text())
    plain.mkdir(parents=True)
    (plain / "config.json").write_text(json.dumps(config))
    metadata = {"format": "pt"}
    save_file(meant, plain / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(says)}))
    save_file(stored, folder / "model.safetensors", metadata)
