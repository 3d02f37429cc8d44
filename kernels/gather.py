# SPDX-License-Identifier: Apache-2.0
"""Copying of whole tokens, of all KV heads, out of a pool."""

import torch

from tandemkv.kernels.check import INT8, INTS, KV_FLOATS, Dims, fail
from tandemkv.kernels.dispatch import uses_triton


def gather_tokens(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Copy keys and values at `slots` of a pool, bit by bit and in their order.

    Parameters
    ----------
    k_pool, v_pool : torch.Tensor
        ``[num_pool_slots, num_kv_heads, head_dim]``, float, float8_e4m3fn or int8, dense. May be
        another GPU's memory.
    slots : torch.Tensor
        ``[num_tokens]``, int32 or int64, dense. On a GPU the range is not checked.
    k_out, v_out : torch.Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, dtype of the pools, dense. Written.

    Notes
    -----
    Asynchronous on the current stream. On a GPU it is made for reading over NVLink: few programs
    with many bytes under way, so that kernels beside it keep most of the GPU.
    """
    dims, layout = Dims(), "num_pool_slots num_kv_heads head_dim"
    dims.check("k_pool", k_pool, layout, KV_FLOATS + INT8)
    dims.check("v_pool", v_pool, layout, (k_pool.dtype,))
    dims.check("slots", slots, "num_tokens", INTS)
    dims.check("k_out", k_out, "num_tokens num_kv_heads head_dim", (k_pool.dtype,))
    dims.check("v_out", v_out, "num_tokens num_kv_heads head_dim", (k_pool.dtype,))
    given = {"k_pool": k_pool, "v_pool": v_pool, "slots": slots, "k_out": k_out, "v_out": v_out}
    for name, tensor in given.items():
        if not tensor.is_contiguous():
            fail(f"{name}.stride()", tensor.stride(), "dense")
    if uses_triton(k_pool.device):
        from tandemkv.kernels.triton_ops.gather import gather_tokens as on_gpu

        return on_gpu(k_pool, v_pool, slots, k_out, v_out)
    for pool, out in ((k_pool, k_out), (v_pool, v_out)):
        out.view(torch.uint8).copy_(pool.view(torch.uint8)[slots.long()])
