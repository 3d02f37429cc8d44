# SPDX-License-Identifier: Apache-2.0
"""Order statistics inside one program, shared by the selection kernels.

A block of keys stays in registers while a threshold is searched by thirds of the
interval that is left: two counts travel in one reduction. 32 bits take at most 21
of them, and most searches stop far earlier.
"""

import triton
import triton.language as tl

# Below the key of every score that may be chosen.
NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def score_key(score):
    """Map float32 to int32 of the same order; -inf and NaN become `NO_KEY`, -0.0 equals 0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score > float("-inf"), key, -(2**31))


@triton.jit
def key_score(key):
    """Undo `score_key`; `NO_KEY` becomes -inf."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == -(2**31), float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def pack_counts(keys, first, second):
    """Sum up how many keys reach each of two bounds, 16 bits a count; at most 32767 keys."""
    counts = (keys >= first.to(keys.dtype)).to(tl.int32)
    return tl.sum(counts + tl.where(keys >= second.to(keys.dtype), 65536, 0), 0)


@triton.jit
def narrow(low, high, count, found, first, second, at_first, at_second):
    """Keep the third of ``[low, high)`` in which the threshold is."""
    above, far_above = at_first >= count, at_second >= count
    new_low = tl.where(far_above, second, tl.where(above, first, low))
    new_found = tl.where(far_above, at_second, tl.where(above, at_first, found))
    new_high = tl.where(above, tl.where(far_above, high, second), first)
    return new_low, new_high, new_found


@triton.jit
def thirds(low, high):
    """Return two bounds inside ``(low, high]``, ascending."""
    third = tl.maximum((high - low) // 3, 1)
    return low + third, tl.minimum(low + third + third, high)


@triton.jit
def reach(keys, count, low, high, found, slack):
    """Return a bound that at least `count` keys reach, and how many do.

    It is the highest such bound, or an earlier one that at most ``count + slack`` reach.
    `found` keys reach `low`, at least `count`; fewer reach `high`. Up to 32767 keys.
    """
    zero = tl.zeros([], tl.int64)
    low, high, limit = low + zero, high + zero, count + slack
    found += tl.zeros([], tl.int32)
    while (high - low > 1) & (found > limit):
        first, second = thirds(low, high)
        packed = pack_counts(keys, first, second)
        low, high, found = narrow(
            low, high, count, found, first, second, packed & 0xFFFF, packed >> 16
        )
    return low, found
