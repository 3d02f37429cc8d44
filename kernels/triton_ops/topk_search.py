# SPDX-License-Identifier: Apache-2.0
"""Order statistics inside one program, shared by the selection kernels.

A block of keys stays in registers while a threshold is searched by quarters of
the interval that is left: three counts travel in one reduction, so 32 bits take
at most 16 of them and most searches stop far earlier.
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
def pack_counts(keys, first, second, third):
    """Count the keys that reach each of three bounds, 16 bits a count (the third has 32)."""
    low = (keys >= first.to(keys.dtype)).to(tl.int32)
    low += (keys >= second.to(keys.dtype)).to(tl.int32) << 16
    return low.to(tl.int64) + ((keys >= third.to(keys.dtype)).to(tl.int64) << 32)


@triton.jit
def unpack_counts(packed):
    """Undo the packing of a sum of `pack_counts`."""
    return packed & 0xFFFF, (packed >> 16) & 0xFFFF, packed >> 32


@triton.jit
def narrow(low, high, count, found, first, second, third, at_first, at_second, at_third):
    """Keep the quarter of ``[low, high)`` in which the threshold is."""
    new_low = tl.where(at_first >= count, first, low)
    new_low = tl.where(at_second >= count, second, new_low)
    new_low = tl.where(at_third >= count, third, new_low)
    new_found = tl.where(at_first >= count, at_first, found)
    new_found = tl.where(at_second >= count, at_second, new_found)
    new_found = tl.where(at_third >= count, at_third, new_found)
    new_high = tl.where(at_third < count, third, high)
    new_high = tl.where(at_second < count, second, new_high)
    new_high = tl.where(at_first < count, first, new_high)
    return new_low, new_high, new_found


@triton.jit
def quarters(low, high):
    """Return three bounds inside ``(low, high]``, ascending."""
    quarter = tl.maximum((high - low) // 4, 1)
    first = low + quarter
    second = tl.minimum(first + quarter, high)
    return first, second, tl.minimum(second + quarter, high)


@triton.jit
def reach(keys, count, low, high, found, slack):
    """Return a bound that at least `count` keys reach, and how many do.

    It is the highest such bound, or an earlier one that at most ``count + slack`` reach.
    `found` keys reach `low`, at least `count`; fewer reach `high`. Up to 65535 keys.
    """
    zero = tl.zeros([], tl.int64)
    low, high, found, limit = low + zero, high + zero, found + zero, count + slack + zero
    while (high - low > 1) & (found > limit):
        first, second, third = quarters(low, high)
        packed = tl.sum(pack_counts(keys, first, second, third), 0)
        at_first, at_second, at_third = unpack_counts(packed)
        low, high, found = narrow(
            low, high, count, found, first, second, third, at_first, at_second, at_third
        )
    return low, found
