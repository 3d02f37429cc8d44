# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.step_flags`, for flags that another process or thread raises."""

import time

import torch

_PAUSE_S = 20e-6


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
    raise_flags(flags, step=step, lost=lost, follows=False, stamp=None)


def raise_flags(
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
    follows: bool,
    stamp: torch.Tensor | None,
) -> None:
    """Raise; see `tandemkv.kernels.step_flags.raise_flags`."""
    del follows
    if stamp is not None and not lost.any() and bool((stamp - step < 0).any()):
        lost.copy_(step)
    if not lost.any():
        flags.fill_(int(step))


def wait_flags(
    flags: torch.Tensor,
    *,
    step: torch.Tensor,
    lost: torch.Tensor,
    timeout_s: float,
    stamp: torch.Tensor | None,
) -> None:
    """Poll; see `tandemkv.kernels.step_flags.wait_flags`."""
    deadline = time.monotonic() + timeout_s
    while not lost.any() and bool((flags - step < 0).any()):
        if time.monotonic() > deadline:
            lost.copy_(step)
            break
        time.sleep(_PAUSE_S)
    if stamp is not None:
        stamp.copy_(step - 1 if lost.any() else step)
