# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.append`: one program per head of a token.

Where flags are awaited the first program polls them: a kernel of its own for that takes 2 us, its
launch included.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.append import SampleMoves
from tandemkv.kernels.step_flags import StepWait
from tandemkv.kernels.triton_ops.bits import as_bits
from tandemkv.kernels.triton_ops.step_flags import await_step

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _append_kernel(
    k, v, rows, slots, k_res, v_res, k_smp, v_smp, samples, sources, awaited, step, lost,
    head_dim, num_flags, timeout_ns,
    k_stride_b, k_stride_h, k_stride_d, v_stride_b, v_stride_h, v_stride_d,
    rows_stride, slots_stride,
    kr_stride_r, kr_stride_s, kr_stride_h, kr_stride_d,
    vr_stride_r, vr_stride_s, vr_stride_h, vr_stride_d,
    ks_stride_r, ks_stride_s, ks_stride_h, ks_stride_d,
    vs_stride_r, vs_stride_s, vs_stride_h, vs_stride_d, samples_stride, sources_stride,
    HAS_SAMPLES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    USE_ASM: tl.constexpr,
):  # fmt: skip
    req, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + req * rows_stride).to(tl.int64)
    slot = tl.load(slots + req * slots_stride).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    mask = dim < head_dim
    key = tl.load(k + req * k_stride_b + head * k_stride_h + dim * k_stride_d, mask=mask)
    value = tl.load(v + req * v_stride_b + head * v_stride_h + dim * v_stride_d, mask=mask)
    if HAS_SAMPLES:
        sample = tl.load(samples + req * samples_stride)
        source = tl.load(sources + req * sources_stride)
        moved = mask & (sample >= 0)
        k_from = k_res + row * kr_stride_r + source * kr_stride_s + head * kr_stride_h
        v_from = v_res + row * vr_stride_r + source * vr_stride_s + head * vr_stride_h
        old_key = tl.load(k_from + dim * kr_stride_d, mask=moved)
        old_value = tl.load(v_from + dim * vr_stride_d, mask=moved)
        k_smp += row * ks_stride_r + sample * ks_stride_s + head * ks_stride_h
        v_smp += row * vs_stride_r + sample * vs_stride_s + head * vs_stride_h
        tl.store(k_smp + dim * ks_stride_d, old_key, mask=moved)
        tl.store(v_smp + dim * vs_stride_d, old_value, mask=moved)
    k_to = k_res + row * kr_stride_r + slot * kr_stride_s + head * kr_stride_h
    v_to = v_res + row * vr_stride_r + slot * vr_stride_s + head * vr_stride_h
    tl.store(k_to + dim * kr_stride_d, key, mask=mask)
    tl.store(v_to + dim * vr_stride_d, value, mask=mask)
    if BLOCK_F:  # noqa: SIM102 (a constant)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            await_step(awaited, num_flags, step, lost, timeout_ns, BLOCK_F, USE_ASM)


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    *,
    moves: SampleMoves | None,
    awaited: StepWait | None = None,
) -> None:
    """Write; see `tandemkv.kernels.append.append_tokens`."""
    num_reqs, num_heads, head_dim = k.shape
    if not k.numel():
        if awaited is not None:
            awaited.now()
        return
    # Without a wait some tensor stands for what is not looked at.
    flags, step, lost, num_flags, timeout_s = rows, rows, rows, 0, 0.0
    if awaited is not None:
        flags, step, lost = awaited.flags, awaited.step, awaited.lost
        num_flags, timeout_s = len(flags), awaited.timeout_s
    k_smp, v_smp = (k_res, v_res) if moves is None else (moves.k, moves.v)
    samples, sources = (rows, rows) if moves is None else (moves.samples, moves.sources)
    _append_kernel[(num_reqs, num_heads)](
        as_bits(k), as_bits(v), rows, slots, as_bits(k_res), as_bits(v_res),
        as_bits(k_smp), as_bits(v_smp), samples, sources,
        flags, step, lost, head_dim, num_flags, int(timeout_s * 1e9),
        *k.stride(), *v.stride(), *rows.stride(), *slots.stride(),
        *k_res.stride(), *v_res.stride(), *k_smp.stride(), *v_smp.stride(),
        *samples.stride(), *sources.stride(), HAS_SAMPLES=moves is not None,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_F=triton.next_power_of_2(num_flags) if num_flags else 0,
        USE_ASM=not _INTERPRETED, num_warps=1,
    )  # fmt: skip
