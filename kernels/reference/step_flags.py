# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.step_flags`, for a device that does one thing after another."""

import torch


def send_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
) -> None:
    """Write and raise; see `tandemkv.kernels.step_flags.send_rows`."""
    out.copy_(hidden if residual is None else hidden + residual)
    raise_flags(flags, step=step, lost=lost, follows=False)


def raise_flags(
    flags: torch.Tensor, *, step: torch.Tensor, lost: torch.Tensor, follows: bool
) -> None:
    """Raise; see `tandemkv.kernels.step_flags.raise_flags`."""
    del follows
    if not lost.any():
        flags.fill_(int(step))


def wait_flags(
    flags: torch.Tensor, *, step: torch.Tensor, lost: torch.Tensor, timeout_s: float
) -> None:
    """Compare; see `tandemkv.kernels.step_flags.wait_flags`."""
    del timeout_s
    if not lost.any() and bool((flags - step < 0).any()):
        lost.copy_(step)
