# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.flags`, for a device that does one thing after another."""

import torch


def send_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Write and raise; see `tandemkv.kernels.flags.send_rows`."""
    out.copy_(hidden if residual is None else hidden + residual)
    flags.fill_(1)


def raise_flags(flags: torch.Tensor) -> None:
    """Raise; see `tandemkv.kernels.flags.raise_flags`."""
    flags.fill_(1)


def wait_flags(flags: torch.Tensor, *, timeout_s: float) -> None:
    """Take down; see `tandemkv.kernels.flags.wait_flags`."""
    del timeout_s
    if not bool((flags == 1).all()):
        raise RuntimeError(f"flags {flags.tolist()}: some are down, and nobody would raise them")
    flags.zero_()
