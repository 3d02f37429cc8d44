# SPDX-License-Identifier: Apache-2.0
"""`tandemkv.kernels.slot_rules` inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def latest_slot(position, is_whole, num_resident, num_recent):
    """See `tandemkv.kernels.slot_rules.latest_slots`."""
    rest = (position - num_resident) % num_recent
    in_ring = num_resident + tl.where(rest < 0, rest + num_recent, rest)
    return tl.where(is_whole & (position < num_resident), tl.maximum(position, 0), in_ring)
