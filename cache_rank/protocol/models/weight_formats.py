# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint keeps its matrices, as its ``quantization_config`` says.

One list, as `architectures` is one of models. Prediction of queries reads ``W_q`` by it, the checks
before a start refuse by it, and the plan counts bytes by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt's checkpoints keep what ``config.json`` has of others."""

UNREADABLE: Mapping[str, str] = {
    "bitsandbytes": "its blocks are packed with a codebook",
    "blockwise_int8": "int8 matrices are not read",
    "fbgemm_fp8": "SGLang 0.5.17 does not run it",
    "gguf": "its blocks are packed in llama.cpp's formats",
    "modelopt_fp4": "4-bit floats are not read",
    "modelopt_mixed": "its layers have several formats",
    "mxfp4": "4-bit floats are not read",
    "mxfp8": "scales that are exponents are not read",
    "quark": "its formats are not read",
    "w4afp8": "its formats are not read",
    "w8a8_int8": "int8 matrices are not read",
}
"""Why ``W_q`` cannot be read from formats that SGLang, or another engine, runs, by their names."""
_FP4_BITS = 4 + 8 / 16
"""Of ModelOpt's format: 16 elements share a scale of 8 bits; 32 do in ``mxfp4`` and ``mxfp8``."""
_BITS = {
    "bitsandbytes": 4, "blockwise_int8": 8, "fbgemm_fp8": 8, "modelopt_fp4": _FP4_BITS,
    "mxfp4": 4 + 8 / 32, "mxfp8": 8 + 8 / 32, "w4afp8": 4, "w8a8_int8": 8,
}  # fmt: skip
_UNCONVERTED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""How checkpoints name the list of modules that are not quantised."""
_EXPRESSION = "re:"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The format of the quantised matrices of a checkpoint."""

    method: str = ""
    """As ``quant_method`` names it."""
    packing: Literal["fp8", "awq", "gptq", "compressed", "unknown"] = "unknown"
    """How a matrix is laid out; ``compressed`` is the packing of compressed-tensors. Matrices that
    a checkpoint leaves as they are have none."""
    bits: float = 0.0
    """Of one element with its part of the scales; 0 if it is not known."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, in block-wise fp8."""
    zero_offset: int = 0
    """What GPTQ's kernels add to a stored zero point: 1, and 0 in its second version."""
    is_symmetric: bool = False
    """Whether the zero points of packed integers are all in the middle of the range."""
    reason: str = ""
    """Why ``W_q`` cannot be read, if it cannot; else empty."""
    unconverted: tuple[str, ...] = ()
    """Modules that are not quantised: names or parts of them, with ``*``, or ``re:`` in front."""

    def converts(self, module: str) -> bool:
        """Whether `module`, by its full name, is quantised."""
        return not any(_is_named(module, pattern) for pattern in self.unconverted)


def read_weight_format(model_dir: Path, config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of a model directory's matrices; None if they are not quantised.

    `config` is ``config.json``; `model_dir` may hold ``hf_quant_config.json``.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    path = model_dir / MODELOPT_FILE
    if not found and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("quantization")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            return WeightFormat(method=MODELOPT_FILE, reason=f"the file cannot be read ({error})")
    return format_of({"quantization_config": found})


def format_of(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format that a ``config.json`` names; None if it names none.

    What is damaged or not known is returned with a `reason`, for not every policy reads ``W_q``.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        return WeightFormat(method="unknown", reason="quantization_config is not an object")
    method = str(found.get("quant_method") or "modelopt").lower()
    try:
        read = _READ.get(method, _unknown)(found)
        method, unconverted = read.method or method, _unconverted(found)
        return replace(read, method=method, unconverted=unconverted)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, re.error) as error:
        reason = f"quantization_config lacks or garbles a field ({type(error).__name__}: {error})"
        return WeightFormat(method=method, reason=reason)


def _unread(reason: str, bits: float = 0) -> WeightFormat:
    return WeightFormat(bits=bits, reason=reason)


def _unknown(found: Mapping[str, Any]) -> WeightFormat:
    method = str(found["quant_method"]).lower()
    reason = UNREADABLE.get(method, "this version does not know the format")
    return _unread(reason, _BITS.get(method, 0))


def _fp8(found: Mapping[str, Any]) -> WeightFormat:
    if str(found.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        return _unread(f"fmt={found['fmt']} is another float than e4m3", 8)
    return WeightFormat(packing="fp8", bits=8, block=_block(found.get("weight_block_size")))


def _modelopt(found: Mapping[str, Any]) -> WeightFormat:
    algorithm = str(found.get("quant_algo") or "unknown").upper()
    method = f"modelopt {algorithm}"
    if algorithm == "FP8":
        return WeightFormat(method=method, packing="fp8", bits=8)
    bits = _FP4_BITS if "FP4" in algorithm else 0
    return WeightFormat(method=method, bits=bits, reason="of ModelOpt's formats FP8 alone is read")


def _compressed(found: Mapping[str, Any]) -> WeightFormat:
    groups = found["config_groups"].values()
    weights = [group["weights"] for group in groups if group.get("weights")]
    forms = {str(group.get("format") or found.get("format")) for group in groups}
    kinds = {(str(w["type"]), int(w["num_bits"])) for w in weights}
    names = ", ".join(f"{kind}{bits}" for kind, bits in sorted(kinds)) or "none"
    bits = max((bits for _, bits in kinds), default=0)
    if kinds == {("float", 8)}:
        blocks = {_block(w.get("block_structure")) for w in weights}
        if len(blocks) == 1:
            return WeightFormat(packing="fp8", bits=8, block=blocks.pop())
        return _unread("its blocks have several sizes", 8)
    if forms != {"pack-quantized"} or kinds not in ({("int", 4)}, {("int", 8)}):
        reason = f"float8 and packed integers of 4 or 8 bits are read, and it has {names}"
        return _unread(reason, bits)
    symmetric = {bool(w.get("symmetric", True)) for w in weights}
    if len(symmetric) > 1:
        return _unread("some of it alone is symmetric", bits)
    stored = _packed_bits(bits, int(weights[0].get("group_size") or -1))
    return WeightFormat(packing="compressed", bits=stored, is_symmetric=symmetric.pop())


def _awq(found: Mapping[str, Any]) -> WeightFormat:
    bits = int(found.get("bits") or found["w_bit"])
    stored = _packed_bits(bits, int(found.get("group_size") or found["q_group_size"]))
    version = str(found.get("version") or "gemm").lower()
    if bits != 4:
        return _unread(f"it has {bits} bits, not 4", stored)
    if version != "gemm":
        return _unread(f"version={version} is packed unlike gemm", stored)
    return WeightFormat(packing="awq", bits=stored)


def _gptq(found: Mapping[str, Any]) -> WeightFormat:
    bits = int(found["bits"])
    kind = str(found.get("checkpoint_format") or found.get("format") or "gptq").lower()
    stored = _packed_bits(bits, int(found["group_size"]))
    if bits not in (4, 8):
        return _unread(f"it has {bits} bits, not 4 or 8", stored)
    if kind not in ("gptq", "gptq_v2") or found.get("is_marlin_format"):
        kind = "marlin" if found.get("is_marlin_format") else kind
        return _unread(f"checkpoint_format={kind} is packed otherwise", stored)
    return WeightFormat(
        packing="gptq",
        bits=stored,
        zero_offset=0 if kind == "gptq_v2" else 1,
        # `dynamic` gives some modules other settings.
        is_symmetric=bool(found.get("sym")) and not found.get("dynamic"),
    )


_READ: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "fp8": _fp8, "w8a8_fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq,
    "modelopt": _modelopt, "modelopt_fp8": _modelopt,
}  # fmt: skip


def _packed_bits(bits: int, group: int) -> float:
    """Return the bits of an element with its part of a 16-bit scale and of a zero point."""
    return bits + (16 + bits) / group if group > 0 else float(bits)


def _unconverted(found: Mapping[str, Any]) -> tuple[str, ...]:
    lists = (found.get(name) for name in _UNCONVERTED)
    names = tuple(str(name) for names in lists if isinstance(names, list) for name in names)
    for name in names:
        if name.startswith(_EXPRESSION):
            re.compile(name.removeprefix(_EXPRESSION))
    return names


def _is_named(module: str, pattern: str) -> bool:
    if pattern.startswith(_EXPRESSION):
        return re.match(pattern.removeprefix(_EXPRESSION), module) is not None
    return fnmatchcase(f".{module}.", f"*.{pattern}.*")


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    rows, columns = (int(part) for part in size)
    if min(rows, columns) < 1:
        raise ValueError(f"blocks of {size}")
    return rows, columns
