# SPDX-License-Identifier: Apache-2.0
"""Quantization of keys for the index that scores are computed from."""

import torch

from tandemkv.kernels.check import FLOATS, Dims
from tandemkv.kernels.dispatch import resolve


def quantize_int8(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys symmetrically, with one scale per token and head.

    Parameters
    ----------
    k : torch.Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, float, finite.

    Returns
    -------
    quantized : torch.Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, int8, in ``[-127, 127]``.
    scale : torch.Tensor
        ``[num_tokens, num_kv_heads]``, float32, ``> 0``:
        ``quantized * scale`` is within ``scale / 2`` of `k`.

    Raises
    ------
    ValueError
        If `k` differs from the above, finiteness aside, which is not checked.
    """
    dims = Dims()
    dims.check("k", k, "num_tokens num_kv_heads head_dim", FLOATS)
    result: tuple[torch.Tensor, torch.Tensor] = resolve("quantize", "quantize_int8", k.device)(k)
    return result
