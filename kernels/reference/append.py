# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.append`."""

import torch

from tandemkv.kernels.append import SampleMoves
from tandemkv.kernels.step_flags import StepWait


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
    if moves is not None:
        chosen = (moves.samples >= 0).nonzero()[:, 0]
        own, index, source = rows[chosen].long(), moves.samples[chosen], moves.sources[chosen]
        moves.k[own, index], moves.v[own, index] = k_res[own, source], v_res[own, source]
    k_res[rows.long(), slots.long()] = k
    v_res[rows.long(), slots.long()] = v
    if awaited is not None:
        awaited.now()
