# SPDX-License-Identifier: Apache-2.0
"""Triton version of `attend_paged`: split among programs, then combined."""

import torch
import triton
import triton.language as tl

# Fewer slots per program fill the GPU better, more cost less in the second kernel.
_SPLIT_LEN = 256
# Parts of `attend_paged` at most, and from how many on more than one warp combines them.
_MAX_PAGED_SPLITS = 128
_WIDE_COMBINE = 32
_MIN_DOT = 16  # the smallest extent that tensor cores multiply
_BLOCK_N, _STAGES, _NUM_WARPS = 64, 3, 4
_PROGRAMS = 2048  # in all, about


@triton.jit
def _combine_kernel(
    part_out, part_lse, out, lse, num_splits, head_dim,
    BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    part = index * num_splits + split
    logs = tl.load(part_lse + part, mask=split < num_splits, other=float("-inf"))
    largest = tl.max(logs, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(logs - shift)
    total = tl.sum(weights, 0)
    norm = tl.where(total > 0, total, 1.0)
    parts = tl.load(
        part_out + part[:, None] * head_dim + dim[None, :],
        mask=(split < num_splits)[:, None] & (dim < head_dim)[None, :], other=0.0,
    )  # fmt: skip
    merged = tl.sum(parts * weights[:, None], 0) / norm
    tl.store(out + index * head_dim + dim, merged, mask=dim < head_dim)
    tl.store(lse + index, largest + tl.log(norm))


@triton.jit
def _paged_kernel(
    q, k_pool, v_pool, slots, hi, part_out, part_lse,
    scale, max_len, head_dim, num_heads, num_splits,
    q_stride_b, q_stride_h, q_stride_d,
    k_stride_s, k_stride_h, k_stride_d, v_stride_s, v_stride_h, v_stride_d,
    slots_stride_b, slots_stride_n, hi_stride,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads run fastest: keys of one token are neighbours in memory.
    head = tl.program_id(0) % num_heads
    split = (tl.program_id(0) // num_heads) % num_splits
    req = (tl.program_id(0) // (num_heads * num_splits)).to(tl.int64)
    member, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    q_head = head * GROUP + member
    in_query = (member < GROUP)[:, None] & (dim < head_dim)[None, :]
    query = tl.load(
        q + req * q_stride_b + q_head[:, None] * q_stride_h + dim[None, :] * q_stride_d,
        mask=in_query, other=0.0,
    )  # fmt: skip
    end = tl.minimum(tl.load(hi + req * hi_stride).to(tl.int32), max_len)
    split_len = tl.cdiv(tl.cdiv(end, num_splits), BLOCK_N) * BLOCK_N
    first = split * split_len
    last = tl.minimum(first + split_len, end)
    keys = k_pool + head.to(tl.int64) * k_stride_h + dim[None, :] * k_stride_d
    values = v_pool + head.to(tl.int64) * v_stride_h + dim[None, :] * v_stride_d
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        seen = position < last
        page = tl.load(
            slots + req * slots_stride_b + (position // PAGE).to(tl.int64) * slots_stride_n,
            mask=seen, other=0,
        )  # fmt: skip
        slot = (page.to(tl.int64) * PAGE + position % PAGE)[:, None]
        mask = seen[:, None] & (dim < head_dim)[None, :]
        k = tl.load(keys + slot * k_stride_s, mask=mask, other=0.0)
        v = tl.load(values + slot * v_stride_s, mask=mask, other=0.0).to(query.dtype)
        logits = tl.dot(query, tl.trans(k).to(query.dtype), input_precision=PRECISION) * scale
        logits = tl.where(seen[None, :], logits, float("-inf"))
        peak = tl.maximum(largest, tl.max(logits, 1))
        decay = tl.exp(largest - peak)
        probs = tl.exp(logits - peak[:, None])
        total = total * decay + tl.sum(probs, 1)
        acc = acc * decay[:, None] + tl.dot(probs.to(query.dtype), v, input_precision=PRECISION)
        largest = peak
    index = (req * num_heads * GROUP + q_head) * num_splits + split
    norm = tl.where(total > 0, total, 1.0)
    tl.store(
        part_out + index[:, None] * head_dim + dim[None, :], acc / norm[:, None], mask=in_query
    )
    tl.store(part_lse + index, largest + tl.log(norm), mask=member < GROUP)


def attend_paged(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    hi: torch.Tensor,
    *,
    scale: float,
    page_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to positions; see `tandemkv.kernels.attention.attend_paged`."""
    num_reqs, num_qo_heads, head_dim = q.shape
    num_kv_heads, max_len = k_pool.shape[1], slots.shape[1] * page_size
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not out.numel() or not max_len:
        return out.zero_(), lse.fill_(float("-inf"))
    # The grid depends on shapes only; each program takes an equal part of what is below `hi`.
    wanted = triton.cdiv(_PROGRAMS, num_reqs * num_kv_heads)
    num_splits = max(1, min(wanted, triton.cdiv(max_len, _SPLIT_LEN), _MAX_PAGED_SPLITS))
    part_out = out.new_empty((num_reqs, num_qo_heads, num_splits, head_dim))
    part_lse = out.new_empty((num_reqs, num_qo_heads, num_splits))
    group = num_qo_heads // num_kv_heads
    block_d = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    _paged_kernel[(num_reqs * num_splits * num_kv_heads,)](
        q, k_pool, v_pool, slots, hi, part_out, part_lse,
        scale, max_len, head_dim, num_kv_heads, num_splits,
        *q.stride(), *k_pool.stride(), *v_pool.stride(), *slots.stride(), *hi.stride(),
        GROUP=group, BLOCK_G=max(_MIN_DOT, triton.next_power_of_2(group)), BLOCK_N=_BLOCK_N,
        BLOCK_D=block_d, PAGE=page_size, STAGES=1 if q.dtype == torch.float32 else _STAGES,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=_NUM_WARPS,
    )  # fmt: skip
    _combine_kernel[(num_reqs * num_qo_heads,)](
        part_out, part_lse, out, lse, num_splits, head_dim,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits), BLOCK_D=block_d,
        num_warps=1 if num_splits < _WIDE_COMBINE else 4,
    )  # fmt: skip
    return out, lse
