# SPDX-License-Identifier: Apache-2.0
"""Rows of K and V pools as float32: float32 itself, or bfloat16 seen as uint16."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from .compile import compiled


@intrinsic
def prefetch_row(typingctx: Any, pool: Any, slot: Any, head: Any) -> Any:
    """Ask for row ``pool[slot, head]`` ahead of its use."""
    del typingctx

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        index = [context.cast(builder, args[i], signature.args[i], types.intp) for i in (1, 2)]
        strides = cgutils.unpack_tuple(builder, array.strides, 3)
        start = builder.ptrtoint(array.data, index[0].type)
        start = builder.add(start, builder.mul(index[0], strides[0]))
        start = builder.add(start, builder.mul(index[1], strides[1]))
        shape = cgutils.unpack_tuple(builder, array.shape, 3)
        size = builder.mul(shape[2], strides[2])
        byte_pointer = cgutils.voidptr_t
        kind = cgutils.ir.FunctionType(
            cgutils.ir.VoidType(), [byte_pointer] + [cgutils.ir.IntType(32)] * 3
        )
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        options = [cgutils.ir.Constant(cgutils.ir.IntType(32), x) for x in (0, 3, 1)]
        with cgutils.for_range_slice(
            builder,
            cgutils.ir.Constant(size.type, 0),
            size,
            cgutils.ir.Constant(size.type, 64),
        ) as (offset, _):
            address = builder.inttoptr(builder.add(start, offset), byte_pointer)
            builder.call(function, [address, *options])
        return context.get_dummy_value()

    return types.void(pool, slot, head), emit


def _row(pool: Any, slot: Any, head: Any, bits: Any, floats: Any) -> Any:
    raise NotImplementedError  # compiled code only, where the overload below stands for it


@numba.extending.overload(_row, inline="always")
def _row_overload(pool: Any, slot: Any, head: Any, bits: Any, floats: Any) -> Any:
    del slot, head, bits, floats
    if pool.dtype == types.float32:

        def direct(pool: Any, slot: Any, head: Any, bits: Any, floats: Any) -> Any:
            return pool[slot, head]

        return direct

    def widened(pool: Any, slot: Any, head: Any, bits: Any, floats: Any) -> Any:
        for d in range(bits.shape[0]):
            bits[d] = np.uint32(pool[slot, head, d]) << np.uint32(16)
        return floats

    return widened


@compiled
def row_logits(
    pool: Any, slot: Any, head: Any, query: Any, scale: Any, bits: Any, floats: Any, out: Any
) -> None:
    """Write ``scale * query[g] . pool[slot, head]`` into ``out[g]``; `query` is ``[G, D]``."""
    row = _row(pool, slot, head, bits, floats)
    for g in range(query.shape[0]):
        total = np.float32(0.0)
        for d in range(row.shape[0]):
            total += query[g, d] * row[d]
        out[g] = total * scale


@compiled
def add_row(
    pool: Any, slot: Any, head: Any, weight: Any, bits: Any, floats: Any, total: Any
) -> None:
    """Add ``weight[g] * pool[slot, head]`` to ``total[g]``, ``[G, D]``."""
    row = _row(pool, slot, head, bits, floats)
    for g in range(total.shape[0]):
        factor = weight[g]
        if factor != 0.0:
            for d in range(row.shape[0]):
                total[g, d] += factor * row[d]
