# SPDX-License-Identifier: Apache-2.0
"""Which slot a token has in a resident set with a ring: R resident slots, then the ring's.

Of a request that is attended to as a whole the first R tokens lie in the resident slots, in their
order; every later token, and every recent one of another request, lies in the ring.
`tandemkv.kernels.triton_ops.slot_rules` is the same for kernels.
"""

import torch


def ring_slots(positions: torch.Tensor, *, num_resident: int, num_recent: int) -> torch.Tensor:
    """Return the slots of ``positions [...]`` integers in the ring behind the resident slots."""
    return num_resident + torch.remainder(positions - num_resident, num_recent)


def latest_slots(
    positions: torch.Tensor, is_whole: torch.Tensor, *, num_resident: int, num_recent: int
) -> torch.Tensor:
    """Return the slots of latest tokens, or of any of requests that `is_whole` holds for.

    ``positions [...]`` integers, negative ones stand for none and get some slot; `is_whole`
    likewise, bool: whether the request is attended to as a whole.
    """
    in_ring = ring_slots(positions, num_resident=num_resident, num_recent=num_recent)
    return torch.where(is_whole & (positions < num_resident), positions.clamp(min=0), in_ring)
