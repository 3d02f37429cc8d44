# SPDX-License-Identifier: Apache-2.0
"""Triton version of `tandemkv.kernels.step_flags`.

Raising is a release at system scope after a barrier of the program, so it covers what all its
threads, and kernels before it, wrote to either GPU. Waiting polls with ``ld.acquire``, never with
atomics: those took 200 us a round trip between two H200 where loads took 3.6 us.
"""

import torch
import triton
import triton.language as tl

from tandemkv.kernels.triton_ops.chained import follow, is_chained, lead

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _load_acquire(flags, mask, USE_ASM: tl.constexpr):
    if USE_ASM:
        return tl.inline_asm_elementwise(
            """{
                .reg .pred p;
                setp.ne.u32 p, $2, 0;
                mov.u32 $0, 1;
                @p ld.acquire.sys.global.u32 $0, [$1];
            }""",
            "=r,l,r", [flags, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(flags, mask=mask, other=1)


@triton.jit
def _nanoseconds(USE_ASM: tl.constexpr):
    if USE_ASM:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.full([], 0, tl.int64)


@triton.jit
def _lost_number(step):
    return tl.where(step == 0, -1, step)


@triton.jit
def _send_kernel(
    rows, out, flags, step, lost, width, row_stride, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number, is_lost = tl.load(step), tl.load(lost)
    start = tl.zeros([], tl.int32)
    while start < width:
        at = start + tl.arange(0, BLOCK)
        x = tl.load(rows + row * row_stride + at, mask=at < width)
        tl.store(out + row * out_stride + at, x, mask=(at < width) & (is_lost == 0))
        start += BLOCK
    tl.debug_barrier()
    tl.atomic_xchg(flags + row, number, mask=is_lost == 0, sem="release", scope="sys")


# Flags lie anywhere among others. One kernel for each power of two of them can be loaded ahead.
_ANYWHERE = {
    "do_not_specialize": ["num_flags"],
    "do_not_specialize_on_alignment": ["flags", "stamp"],
}


@triton.jit(**_ANYWHERE)
def _raise_kernel(
    flags, num_flags, step, lost, stamp,
    HAS_STAMP: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    follow(CHAINED)
    number, is_lost = tl.load(step), tl.load(lost)
    if HAS_STAMP:
        is_missing = tl.load(stamp) - number < 0
        tl.store(lost, _lost_number(number), mask=is_missing & (is_lost == 0))
        is_lost = tl.where(is_missing, 1, is_lost)
    tl.atomic_xchg(
        flags + at, tl.full([BLOCK], 0, tl.int32) + number,
        mask=(at < num_flags) & (is_lost == 0), sem="release", scope="sys",
    )  # fmt: skip


@triton.jit
def _num_missing(flags, mask, wanted, USE_ASM: tl.constexpr):
    found = _load_acquire(flags, mask, USE_ASM)
    return tl.sum((mask & (found - wanted < 0)).to(tl.int32), 0)


@triton.jit
def await_step(
    flags, num_flags, step, lost, timeout_ns, BLOCK: tl.constexpr, USE_ASM: tl.constexpr
):
    """Poll until all flags are raised to `step`, or `lost` is; for one program of a kernel.

    Returns whether they are, and nothing is lost.
    """
    at = tl.arange(0, BLOCK)
    mask = at < num_flags
    wanted, is_lost = tl.load(step), tl.load(lost, volatile=True)
    num_missing = _num_missing(flags + at, mask, wanted, USE_ASM)
    end, is_late = _nanoseconds(USE_ASM) + timeout_ns, tl.full([], 0, tl.int32)
    while (num_missing > 0) & (is_late == 0) & (is_lost == 0):
        num_missing = _num_missing(flags + at, mask, wanted, USE_ASM)
        is_late = (_nanoseconds(USE_ASM) > end).to(tl.int32)
        is_lost = tl.load(lost, volatile=True)
        if not USE_ASM:  # nobody could raise them meanwhile
            is_late = tl.full([], 1, tl.int32)
    tl.store(lost, _lost_number(wanted), mask=(num_missing > 0) & (is_lost == 0))
    return (num_missing == 0) & (is_lost == 0)


@triton.jit(**_ANYWHERE)
def _wait_kernel(
    flags, num_flags, step, lost, stamp, timeout_ns,
    HAS_STAMP: tl.constexpr, BLOCK: tl.constexpr, USE_ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    is_raised = await_step(flags, num_flags, step, lost, timeout_ns, BLOCK, USE_ASM)
    if HAS_STAMP:
        tl.store(stamp, tl.load(step) - tl.where(is_raised, 0, 1))
    lead(CHAINED)  # not before: what is launched takes room


def send_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
) -> None:
    """Write and raise; see `tandemkv.kernels.step_flags.send_rows`."""
    num_rows, width = rows.shape
    if not num_rows:
        return
    for name, tensor in (("rows", rows), ("out", out)):
        if tensor.stride(1) != 1:
            raise ValueError(f"{name}.stride()={tensor.stride()}: must be 1 in the last place")
    block = min(4096, triton.next_power_of_2(width))
    _send_kernel[(num_rows,)](
        rows, out, flags, step, lost, width, rows.stride(0), out.stride(0),
        BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip


def raise_flags(
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
    follows: bool,
    stamp: torch.Tensor | None,
) -> None:
    """Raise; see `tandemkv.kernels.step_flags.raise_flags`."""
    has_stamp = stamp is not None
    if len(flags) or has_stamp:
        chained = follows and is_chained(flags.device)
        _raise_kernel[(1,)](
            flags, len(flags), step, lost, stamp if has_stamp else lost, HAS_STAMP=has_stamp,
            BLOCK=triton.next_power_of_2(max(1, len(flags))), CHAINED=chained, launch_pdl=chained,
            num_warps=1,
        )  # fmt: skip


def wait_flags(
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
    timeout_s: float,
    stamp: torch.Tensor | None,
) -> None:
    """Wait; see `tandemkv.kernels.step_flags.wait_flags`."""
    has_stamp = stamp is not None
    if len(flags) or has_stamp:
        _wait_kernel[(1,)](
            flags, len(flags), step, lost, stamp if has_stamp else lost, int(timeout_s * 1e9),
            HAS_STAMP=has_stamp, BLOCK=triton.next_power_of_2(max(1, len(flags))),
            USE_ASM=not _INTERPRETED, CHAINED=is_chained(flags.device), num_warps=1,
        )  # fmt: skip
