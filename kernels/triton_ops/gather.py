# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.gather`: a few programs that walk over all tokens.

What a program loads before it stores anything is what it has under way. Over NVLink a load takes
about 2 us, so 64 programs of 32 KiB are enough for its bandwidth, on half of a Hopper GPU.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.bits import as_bits

_MOST_PROGRAMS, _NUM_WARPS = 64, 8
_BLOCK_BYTES = 16 << 10
"""Of keys, and as many of values, that a program has under way."""


# Else other numbers of tokens would be compiled for in the middle of a pass.
@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    k_pool, v_pool, slots, k_out, v_out,
    num_tokens, width,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_W)[None, :]
    first = tl.program_id(0) * BLOCK
    while first < num_tokens:
        token = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + token, mask=token < num_tokens, other=0).to(tl.int64)
        mask = (token < num_tokens)[:, None] & (column < width)
        source = slot[:, None] * width + column
        target = token.to(tl.int64)[:, None] * width + column
        keys = tl.load(k_pool + source, mask=mask)
        values = tl.load(v_pool + source, mask=mask)
        tl.store(k_out + target, keys, mask=mask)
        tl.store(v_out + target, values, mask=mask)
        first += tl.num_programs(0) * BLOCK


def gather_tokens(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Copy tokens; see `tandemkv.kernels.gather.gather_tokens`."""
    num_tokens, width = len(slots), k_pool.shape[1] * k_pool.shape[2]
    if not num_tokens * width:
        return
    block_w = triton.next_power_of_2(width)
    block = max(1, _BLOCK_BYTES // (block_w * k_pool.element_size()))
    _gather_kernel[(min(_MOST_PROGRAMS, triton.cdiv(num_tokens, block)),)](
        as_bits(k_pool), as_bits(v_pool), slots, as_bits(k_out), as_bits(v_out),
        num_tokens, width, BLOCK=block, BLOCK_W=block_w, num_warps=_NUM_WARPS,
    )  # fmt: skip
