# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.samples`."""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.check import fail
from tandemkv.kernels.samples import SPLIT_SAMPLES
from tandemkv.kernels.triton_ops.slot_rules import latest_slot

_MIN_DOT = 16  # the smallest extent that tensor cores multiply


@triton.jit
def offsets_of(index, count, NUM_SAMPLES: tl.constexpr):
    """Return offset and span of the samples `index` of `count` candidates; see `sample_offsets`.

    Offsets from `count` on do not exist. The third result is the logarithm of the finest stride.
    """
    # What depends on the stride is made of the counter: Triton does not carry a name through a
    # loop that began as another's value.
    offset, shift = index, tl.full([], 0, tl.int32)
    while (NUM_SAMPLES << shift) < count:
        later = offset + ((NUM_SAMPLES - 1) << shift)
        is_odd = ((offset >> shift) & 1) != 0
        offset = tl.where(is_odd & (later < count), later, offset)
        shift += 1
    shift = tl.maximum(shift - 1, 0)
    first = NUM_SAMPLES << shift
    is_even = ((offset >> shift) & 1) == 0
    is_wide = is_even & ((offset + first < count) | (offset >= first))
    one = tl.full([], 1, tl.int32)
    span = tl.where(is_wide & (count > NUM_SAMPLES), (one << shift) * 2, one << shift)
    return offset, span, shift


@triton.jit
def _slots_kernel(
    rows, lengths, req_to_token, slots, num_sink, num_recent,
    rows_stride, lengths_stride, table_stride_r, table_stride_c, slots_stride_b, slots_stride_c,
    NUM_SAMPLES: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    req, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_S)
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    count = tl.load(lengths + req * lengths_stride).to(tl.int32) - num_recent - num_sink
    offset, _, _ = offsets_of(index, count, NUM_SAMPLES)
    found = tl.load(
        req_to_token + row * table_stride_r + (num_sink + offset).to(tl.int64) * table_stride_c,
        mask=(index < NUM_SAMPLES) & (offset < count), other=0,
    )  # fmt: skip
    to = slots + req * slots_stride_b + index * slots_stride_c
    tl.store(to, found.to(tl.int32), mask=index < NUM_SAMPLES)


@triton.jit
def _moves_kernel(
    lengths, moves, sources, num_sink, num_resident, num_recent, num_dense,
    lengths_stride, moves_stride, sources_stride,
    NUM_SAMPLES: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    req, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_S)
    length = tl.load(lengths + req * lengths_stride).to(tl.int32)
    position = length - num_recent - 1
    count = tl.maximum(position + 1 - num_sink, 0)
    offset, _, _ = offsets_of(index, count, NUM_SAMPLES)
    is_newest = (index < NUM_SAMPLES) & (offset == count - 1)
    source = latest_slot(position, length <= num_dense, num_resident, num_recent)
    move = tl.max(tl.where(is_newest, index, -1), 0)
    tl.store(moves + req * moves_stride, move.to(tl.int64))
    tl.store(sources + req * sources_stride, source.to(tl.int64))


@triton.jit
def _parts_kernel(
    q, k_pool, v_pool, slots, rows, log_weight, active, parts, scale, head_dim,
    q_stride_b, q_stride_h, q_stride_d, k_stride_s, k_stride_h, k_stride_d,
    v_stride_s, v_stride_h, v_stride_d, slots_stride_b, slots_stride_n, rows_stride,
    weight_stride_r, weight_stride_h, weight_stride_n, active_stride,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_SAMPLES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    req, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if tl.load(active + req * active_stride) == 0:
        return
    member, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    q_head = head * GROUP + member
    is_member, in_dim = member < GROUP, dim < head_dim
    in_query = is_member[:, None] & in_dim[None, :]
    query = tl.load(
        q + req * q_stride_b + q_head[:, None] * q_stride_h + dim[None, :] * q_stride_d,
        mask=in_query, other=0.0,
    )  # fmt: skip
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    sample = split * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = tl.load(
        log_weight + row * weight_stride_r + head * weight_stride_h + sample * weight_stride_n,
        mask=sample < NUM_SAMPLES, other=float("-inf"),
    )  # fmt: skip
    slot = tl.load(
        slots + req * slots_stride_b + sample * slots_stride_n, mask=sample < NUM_SAMPLES, other=0
    ).to(tl.int64)[:, None]  # fmt: skip
    is_counted = weight > float("-inf")
    mask = is_counted[:, None] & in_dim[None, :]
    k = tl.load(
        k_pool + head * k_stride_h + slot * k_stride_s + dim[None, :] * k_stride_d,
        mask=mask, other=0.0,
    )  # fmt: skip
    v = tl.load(
        v_pool + head * v_stride_h + slot * v_stride_s + dim[None, :] * v_stride_d,
        mask=mask, other=0.0,
    ).to(query.dtype)  # fmt: skip
    logits = tl.dot(query, tl.trans(k).to(query.dtype), input_precision=PRECISION) * scale
    logits = tl.where(is_counted[None, :], logits + weight[None, :], float("-inf"))
    peak = tl.max(logits, 1)
    probs = tl.exp(logits - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = tl.sum(probs, 1)
    acc = tl.dot(probs.to(query.dtype), v, input_precision=PRECISION)

    place = (req * tl.num_programs(1) + head) * SPLITS + split
    part = parts + (place * GROUP + member) * (head_dim + 2)
    tl.store(part[:, None] + dim[None, :], acc, mask=in_query)
    tl.store(part + head_dim, peak, mask=is_member)
    tl.store(part + head_dim + 1, total, mask=is_member)


@triton.jit
def _merge_kernel(
    active, out, lse, parts, lse_unit, head_dim, active_stride, lse_stride_b, lse_stride_h,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    req, q_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(active + req * active_stride) == 0:
        return
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    is_split, in_dim = split < SPLITS, dim < head_dim
    num_q_heads = tl.num_programs(1)
    place = (req * (num_q_heads // GROUP) + q_head // GROUP) * SPLITS + split
    part = parts + (place * GROUP + q_head % GROUP) * (head_dim + 2)
    found = tl.load(
        part[:, None] + dim[None, :], mask=is_split[:, None] & in_dim[None, :], other=0.0
    )
    peak = tl.load(part + head_dim, mask=is_split, other=float("-inf"))
    summed = tl.load(part + head_dim + 1, mask=is_split, other=0.0)
    # What was attended to before is one more part, of the denominator 1.
    before = tl.load(lse + req * lse_stride_b + q_head * lse_stride_h) * lse_unit
    to = out + (req * num_q_heads + q_head) * head_dim + dim
    kept = tl.load(to, mask=in_dim, other=0.0).to(tl.float32)
    kept = tl.where(before == float("-inf"), 0.0, kept)
    largest = tl.maximum(tl.max(peak, 0), before)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    share, own = tl.exp(peak - shift), tl.exp(before - shift)
    total = own + tl.sum(summed * share, 0)
    acc = kept * own + tl.sum(found * share[:, None], 0)
    norm = tl.where(total > 0, total, 1.0)
    tl.store(to, (acc / norm).to(out.dtype.element_ty), mask=in_dim)


def load_sample_slots(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_sink: int,
    num_recent: int,
) -> None:
    """Fill; see `tandemkv.kernels.samples.load_sample_slots`."""
    if not len(rows):
        return
    num_samples = slots.shape[1]
    _slots_kernel[(len(rows),)](
        rows, lengths, req_to_token, slots, num_sink, num_recent,
        rows.stride(0), lengths.stride(0), *req_to_token.stride(), *slots.stride(),
        NUM_SAMPLES=num_samples, BLOCK_S=triton.next_power_of_2(num_samples), num_warps=4,
    )  # fmt: skip


def load_sample_moves(
    lengths: torch.Tensor,
    moves: torch.Tensor,
    sources: torch.Tensor,
    *,
    num_samples: int,
    num_sink: int,
    num_resident: int,
    num_recent: int,
    num_dense: int,
) -> None:
    """Fill; see `tandemkv.kernels.samples.load_sample_moves`."""
    if not len(lengths):
        return
    _moves_kernel[(len(lengths),)](
        lengths, moves, sources, num_sink, num_resident, num_recent, num_dense,
        lengths.stride(0), moves.stride(0), sources.stride(0),
        NUM_SAMPLES=num_samples, BLOCK_S=triton.next_power_of_2(num_samples), num_warps=4,
    )  # fmt: skip


def begin_samples(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    log_weight: torch.Tensor,
    active: torch.Tensor,
    *,
    scale: float,
    scratch: torch.Tensor | None,
) -> None:
    """Attend to samples alone; see `tandemkv.kernels.samples.begin_samples`."""
    num_reqs, num_qo_heads, head_dim = q.shape
    num_kv_heads, num_samples = log_weight.shape[1:]
    if not q.numel():
        return
    if scratch is None:
        fail("scratch", None, "given on a GPU; make it once with make_sample_scratch")
    group, is_full = num_qo_heads // num_kv_heads, q.dtype == torch.float32
    splits = -(-num_samples // SPLIT_SAMPLES)
    if scratch.numel() < num_reqs * num_qo_heads * splits * (head_dim + 2):
        fail("scratch", scratch.shape, "made for at least the sizes of the call")
    _parts_kernel[(num_reqs, num_kv_heads, splits)](
        q, k_pool, v_pool, slots, rows, log_weight, active.view(torch.uint8), scratch,
        scale, head_dim,
        *q.stride(), *k_pool.stride(), *v_pool.stride(), *slots.stride(), rows.stride(0),
        *log_weight.stride(), active.stride(0),
        GROUP=group, BLOCK_G=max(_MIN_DOT, triton.next_power_of_2(group)),
        BLOCK_N=SPLIT_SAMPLES, BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
        NUM_SAMPLES=num_samples, SPLITS=splits, PRECISION="ieee" if is_full else "tf32",
        num_warps=4,
    )  # fmt: skip


def attend_samples(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    log_weight: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    lse_unit: float,
    scratch: torch.Tensor | None,
    has_begun: bool = False,
) -> None:
    """Attend and merge; see `tandemkv.kernels.samples.attend_samples`."""
    if not has_begun:
        begin_samples(
            q, k_pool, v_pool, slots, rows, log_weight, active, scale=scale, scratch=scratch
        )  # fmt: skip
    num_reqs, num_qo_heads, head_dim = q.shape
    if not q.numel():
        return
    splits = -(-log_weight.shape[2] // SPLIT_SAMPLES)
    _merge_kernel[(num_reqs, num_qo_heads)](
        active.view(torch.uint8), out, lse, scratch, lse_unit, head_dim,
        active.stride(0), *lse.stride(),
        GROUP=num_qo_heads // log_weight.shape[1], BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_D=triton.next_power_of_2(head_dim), SPLITS=splits, num_warps=2,
    )  # fmt: skip
