# SPDX-License-Identifier: Apache-2.0
"""Order statistics inside one program, shared by the selection kernels.

A block of keys stays in registers while a threshold is searched by thirds of the
interval that is left: two counts travel in one reduction. 32 bits take at most 21
of them, and most searches stop far earlier.
"""

import triton
import triton.language as tl


@triton.jit
def score_key(score):
    """Map float32 to int32 of the same order; -inf and NaN become the least, -0.0 equals 0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score > float("-inf"), key, -(2**31))


@triton.jit
def key_score(key):
    """Undo `score_key`; the least key becomes -inf."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == -(2**31), float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def pack_counts(keys, first, second):
    """Sum up how many keys reach each of two bounds, 16 bits a count; at most 32767 keys."""
    counts = (keys >= first).to(tl.int32)
    return tl.sum(counts + tl.where(keys >= second, 65536, 0), 0)


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
    """Return two bounds inside ``(low, high]``, ascending; all in the type of the keys."""
    # Up to 2**32 keys of 32 bits lie between: a width that only an unsigned number holds.
    unsigned: tl.constexpr = tl.uint64 if low.dtype == tl.int64 else tl.uint32
    width = (high - low).to(unsigned, bitcast=True)
    third = tl.maximum(width // 3, 1).to(low.dtype, bitcast=True)
    return low + third, tl.minimum(low + third + third, high)


@triton.jit
def reach(keys, count, low, high, found, slack):
    """Return a bound that at least `count` keys reach, and how many do.

    It is the highest such bound, or an earlier one that at most ``count + slack`` reach.
    `found` keys reach `low`, at least `count`; fewer reach `high`. Up to 32767 keys; bounds are
    of their type.
    """
    zero = tl.zeros([], keys.dtype)
    low, high, limit = low + zero, high + zero, count + slack
    found += tl.zeros([], tl.int32)
    while (low + 1 < high) & (found > limit):
        first, second = thirds(low, high)
        packed = pack_counts(keys, first, second)
        low, high, found = narrow(
            low, high, count, found, first, second, packed & 0xFFFF, packed >> 16
        )
    return low, found
