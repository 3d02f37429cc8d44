# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for SGLang's kernels for quantised matrices, which need a GPU or AMX.

Modules, names of tensors, and loading are SGLang's. What follows on loading is not: a module gets
the matrix that it stands for in float32, and what it had is overwritten, as kernels repack it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.hardware_backend.gpu.quantization.awq_kernels import AWQLinearKernel
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.awq import AWQConfig
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsWNA16,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.layers.quantization.gptq import GPTQConfig
from sglang.srt.layers.quantization.gptq.gptq import GPTQMarlinConfig
from sglang.srt.layers.quantization.gptq.schemes import GPTQLinearScheme


def install() -> None:
    """Put them in SGLang's modules."""
    for config in (Fp8Config, AWQConfig, GPTQConfig, CompressedTensorsConfig):
        config.get_supported_act_dtypes = lambda *_: [torch.float32]
    GPTQMarlinConfig.is_gptq_marlin_compatible = lambda *_: False
    QUANTIZATION_METHODS["gptq"] = GPTQConfig  # newer versions have another one of AMX
    GPTQLinearScheme._init_kernel = lambda *_: _GPTQKernel()
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    for owner, process in (
        (Fp8LinearMethod, _process_fp8), (CompressedTensorsW8A8Fp8, _process_fp8),
        (AWQLinearKernel, _process_awq), (_GPTQKernel, _process_gptq),
        (CompressedTensorsWNA16, _process_compressed),
    ):  # fmt: skip
        owner.process_weights_after_loading = process
        name = "apply_weights" if owner.__name__.startswith("Compressed") else "apply"
        setattr(owner, name, _apply)


class _GPTQKernel:
    """From SGLang 0.5.20 on there is none that is not Marlin's."""

    use_shuffle: bool


def _apply(
    _method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return F.linear(x, layer.stood_for, bias)


def _keep(layer: Any, matrix: torch.Tensor, *repacked: str) -> None:
    """Keep what a module stands for ``[rows, columns]``, and overwrite its own."""
    layer.stood_for = matrix.float()
    for name in repacked:
        getattr(layer, name).data.zero_()


def _process_fp8(method: Any, layer: Any) -> None:
    weight = layer.weight.data.double()
    block = method.weight_block_size
    if block is not None:
        scale = layer.weight_scale_inv.data.double()
        scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        scale = scale[: weight.shape[0], : weight.shape[1]]
    else:
        scale = layer.weight_scale.data.double()
        if scale.dim() < 2:  # one of each matrix that is fused
            sizes = torch.tensor(layer.logical_widths)
            scale = scale.repeat_interleave(sizes)[:, None]
    _keep(layer, weight * scale, "weight")


def _nibbles(words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Spread eight values of four bits of each word along `dim`."""
    parts = [(words.long() >> 4 * place) & 15 for place in order]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _process_awq(_kernel: Any, layer: Any) -> None:
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    codes, zeros = (_nibbles(x.data, 1, order) for x in (layer.qweight, layer.qzeros))
    repeats = len(codes) // len(zeros)
    zeros, scales = (x.repeat_interleave(repeats, 0) for x in (zeros, layer.scales.data.double()))
    _keep(layer, ((codes - zeros) * scales).T, "qweight", "qzeros", "scales")


def _process_gptq(_kernel: Any, layer: Any) -> None:
    codes, zeros = _nibbles(layer.qweight.data, 0), _nibbles(layer.qzeros.data, 1) + 1
    groups = layer.g_idx.data.long()
    matrix = (codes - zeros[groups]) * layer.scales.data.double()[groups]
    _keep(layer, matrix.T, "qweight", "qzeros", "scales", "g_idx")


def _process_compressed(_scheme: Any, layer: Any) -> None:
    codes, scales = _nibbles(layer.weight_packed.data, 1), layer.weight_scale.data.double()
    repeats = codes.shape[1] // scales.shape[1]
    _keep(layer, (codes - 8) * scales.repeat_interleave(repeats, 1), "weight_packed")
