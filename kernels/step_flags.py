# SPDX-License-Identifier: Apache-2.0
"""Flags that hold step numbers: how captured graphs of two processes meet.

A flag lies in the memory of whoever waits for it. It is raised by writing the number of the step,
and never taken down: a wait for step n ends when the flag is n or later, by signed difference, so
what arrives after its wait was given up satisfies no later step. `step` is a word of the process
that raises or waits, so a captured graph can be replayed for any step.

Between two GPUs that is a chain of four orders. What is written to the other GPU's memory by plain
stores, by the raiser or by kernels before it in its stream, happens before the raise: the former by
a barrier of the program, the latter because the kernel that raises begins when they have ended (or,
launched early, waits for that: `tandemkv.kernels.triton_ops.chained`). The raise is a release at
system scope, which is cumulative: whoever reads its value reads all of these stores. The wait polls
its own memory with acquiring loads at system scope. Kernels behind it in its stream begin when it
has ended. Nothing else orders two GPUs, so data goes before its flag, and never after it.

A wait has an end. When it is reached, the wait stores its step in `lost`; from then on waits return
at once and raises do nothing, so the rest of the graph runs through and nothing hangs or traps.
What is sent is not written either: the other side may still read what came before. For 0 tells of
no loss, the number before is stored where the step's own is 0.
"""

import time
from dataclasses import dataclass

import torch

from tandemkv.kernels.check import FLOATS, INT32, Dims, fail
from tandemkv.kernels.dispatch import uses_triton

_PAUSE_S = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """A wait that a kernel makes behind its own work; the arguments of `wait_flags`."""

    flags: torch.Tensor
    step: torch.Tensor
    lost: torch.Tensor
    timeout_s: float

    def check(self) -> None:
        """Raise `ValueError` as `wait_flags` would."""
        _check(self.flags, self.step, self.lost, "n")
        if self.timeout_s <= 0:
            fail("timeout_s", self.timeout_s, "> 0")

    def now(self) -> None:
        """Make it in a launch of its own."""
        wait_flags(self.flags, step=self.step, lost=self.lost, timeout_s=self.timeout_s)


def send_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
) -> None:
    """Write `rows` to `out`, and raise the flag of each; neither is done once `lost` is set.

    Parameters
    ----------
    rows : torch.Tensor
        ``[num_rows, width]``, float.
    out : torch.Tensor
        ``[num_rows, width]``, dtype of `rows`; may be another GPU's memory.
    flags : torch.Tensor
        ``[num_rows]`` int32, in the memory of whoever waits.
    step, lost : torch.Tensor
        ``[1]`` int32; see the module.
    """
    dims = _check(flags, step, lost, "num_rows")
    dims.check("rows", rows, "num_rows width", FLOATS)
    dims.check("out", out, "num_rows width", (rows.dtype,))
    if uses_triton(rows.device):
        from tandemkv.kernels.triton_ops.step_flags import send_rows as on_gpu

        return on_gpu(rows, out, flags, step=step, lost=lost)
    if not lost.any():
        out.copy_(rows)
    raise_flags(flags, step=step, lost=lost, follows=False, stamp=None)


def raise_flags(
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
    follows: bool = False,
    stamp: torch.Tensor | None = None,
) -> None:
    """Raise `flags` ``[n]`` int32 to `step` once everything queued before is complete.

    Parameters
    ----------
    flags : torch.Tensor
        ``[n]`` int32, in the memory of whoever waits.
    step, lost : torch.Tensor
        ``[1]`` int32; see the module.
    follows : bool
        Whether the kernel before this one in its stream is one of a selection. Where those are
        chained (`tandemkv.kernels.streams.let_chain`) this one is launched beside it, and has not
        to wait for room when it ends.
    stamp : torch.Tensor, optional
        ``[1]`` int32, a copy of what `wait_flags` has left elsewhere. If it is before the step,
        `lost` is set to the step, and nothing is raised.
    """
    _check(flags, step, lost, "n")
    if stamp is not None:
        _check_word(Dims(), "stamp", stamp)
    if uses_triton(flags.device):
        from tandemkv.kernels.triton_ops.step_flags import raise_flags as on_gpu

        return on_gpu(flags, step=step, lost=lost, follows=follows, stamp=stamp)
    if stamp is not None and not lost.any() and bool((stamp - step < 0).any()):
        _lose(lost, step)
    if not lost.any():
        flags.fill_(int(step))


def wait_flags(
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
    timeout_s: float,
    stamp: torch.Tensor | None = None,
) -> None:
    """Hold back what is queued next until all `flags` are raised to `step`.

    Parameters
    ----------
    flags : torch.Tensor
        ``[n]`` int32, in this device's memory.
    step, lost : torch.Tensor
        ``[1]`` int32; `lost` is set to the step if the flags do not come in time. Setting it from
        another stream ends a wait that is under way.
    timeout_s : float
        Longest wait.
    stamp : torch.Tensor, optional
        ``[1]`` int32. Set to the step if the flags were raised and nothing is lost, else to the
        number before it: what is copied elsewhere tells there how the wait has ended.
    """
    StepWait(flags=flags, step=step, lost=lost, timeout_s=timeout_s).check()
    if stamp is not None:
        _check_word(Dims(), "stamp", stamp)
    if uses_triton(flags.device):
        from tandemkv.kernels.triton_ops.step_flags import wait_flags as on_gpu

        return on_gpu(flags, step=step, lost=lost, timeout_s=timeout_s, stamp=stamp)
    deadline = time.monotonic() + timeout_s
    while not lost.any() and bool((flags - step < 0).any()):
        if time.monotonic() > deadline:
            _lose(lost, step)
            break
        time.sleep(_PAUSE_S)
    if stamp is not None:
        stamp.copy_(step - 1 if lost.any() else step)


def _lose(lost: torch.Tensor, step: torch.Tensor) -> None:
    lost.copy_(torch.where(step == 0, -1, step))


def _check(flags: torch.Tensor, step: torch.Tensor, lost: torch.Tensor, size: str) -> Dims:
    dims = Dims()
    dims.check("flags", flags, size, INT32)
    _check_word(dims, "step", step)
    _check_word(dims, "lost", lost)
    return dims


def _check_word(dims: Dims, name: str, word: torch.Tensor) -> None:
    dims.check(name, word, "one", INT32)
    if len(word) != 1:
        fail(f"{name}.shape", tuple(word.shape), "[1]")
