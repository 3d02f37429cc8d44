# SPDX-License-Identifier: Apache-2.0
"""Rows of a quantised matrix as numbers, from the layouts of checkpoints.

Every result is the product of stored numbers in float32, rounded once more to the dtype that is
asked for. The product of a float8, or of a small integer, and a scale is exact in float64. So the
result is that of float64, rounded to float32 and to the dtype.
"""

from __future__ import annotations

import torch

_ROWS = 512
"""Rows worked out at once: their float32 temporaries are a few times the result."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of an AWQ word, counted from the lowest, hold each of its eight columns."""


def dequantize_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    first_row: int,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``weight * scale``.

    Parameters
    ----------
    weight : torch.Tensor
        ``[num_rows, num_columns]``, float8_e4m3fn: rows of a matrix from `first_row` on.
    scale : torch.Tensor
        Of the whole matrix, float, on the device of `weight`. With `block` ``[row_blocks,
        column_blocks]``, the last ones of which may be partly outside of the matrix. Else one
        number, or one for each row of the matrix.
    first_row : int
        Of the matrix; need not be the first of a block.
    block : (int, int), optional
        Rows and columns that share a scale.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    torch.Tensor
        ``[num_rows, num_columns]``, `dtype`, on the device of `weight`.
    """
    num_rows, num_columns = weight.shape
    rows = torch.arange(first_row, first_row + num_rows, device=weight.device)
    if block is None:
        flat = scale.float().flatten()
        factors = flat[rows, None] if len(flat) > 1 else flat.expand(num_rows)[:, None]
    else:
        columns = torch.arange(num_columns, device=weight.device) // block[1]
        factors = scale.float()[:, columns]
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=weight.device)
    for first in range(0, num_rows, _ROWS):
        part = slice(first, first + _ROWS)
        own = factors[part] if block is None else factors[rows[part] // block[0]]
        out[part] = weight[part].float() * own
    return out


def dequantize_awq(
    packed: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``((packed - zeros) * scales).T`` of AWQ's 4-bit layout (version gemm).

    Parameters
    ----------
    packed : torch.Tensor
        ``[num_columns, num_rows / 8]``, int32: eight rows of the matrix in a word, in AWQ's order.
    zeros : torch.Tensor
        ``[num_groups, num_rows / 8]``, int32, packed in the same way.
    scales : torch.Tensor
        ``[num_groups, num_rows]``, float. A group is ``num_columns / num_groups`` columns.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    torch.Tensor
        ``[num_rows, num_columns]``, `dtype`, dense.
    """
    num_groups, num_columns = len(zeros), len(packed)
    groups = torch.arange(num_columns, device=packed.device) // (num_columns // num_groups)
    points = _unpack(zeros, 4, _AWQ_ORDER).flatten(1)
    values = _unpack(packed, 4, _AWQ_ORDER).flatten(1)
    return _scaled(values, points, scales, groups, dtype)


def dequantize_gptq(
    packed: torch.Tensor,
    points: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    *,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``((packed - points) * scales).T`` of GPTQ's layout.

    Parameters
    ----------
    packed : torch.Tensor
        ``[num_columns * bits / 32, num_rows]``, int32: columns of the matrix in a word, in order.
    points : torch.Tensor
        ``[num_groups, num_rows]``, int32: zero points, from `zero_points` and what is added there.
    scales : torch.Tensor
        ``[num_groups, num_rows]``, float.
    groups : torch.Tensor, optional
        ``[num_columns]``, int32, from 0 and below ``num_groups``: the group of each column, which
        is in any order where activations were sorted (``desc_act``). Without it a group is
        ``num_columns / num_groups`` columns.
    bits : int
        4 or 8.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    torch.Tensor
        ``[num_rows, num_columns]``, `dtype`, dense.
    """
    values = _unpack(packed, bits, tuple(range(32 // bits))).transpose(1, 2).flatten(0, 1)
    if groups is None:
        columns = torch.arange(len(values), device=packed.device)
        groups = columns // (len(values) // len(points))
    return _scaled(values, points, scales, groups.long(), dtype)


def zero_points(zeros: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return the stored zero points ``[num_groups, num_rows]`` of GPTQ's layout, int32.

    `zeros` is ``[num_groups, num_rows * bits / 32]``, int32: rows of the matrix in a word, in
    order. GPTQ's first version stores one less than what its kernels subtract.
    """
    return _unpack(zeros, bits, tuple(range(32 // bits))).flatten(1)


def _unpack(words: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Return ``[..., 32 / bits]`` non-negative integers of each word, int32."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * bits
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _scaled(
    values: torch.Tensor,
    points: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``((values - points[groups]) * scales[groups]).T``, dense."""
    num_columns, num_rows = values.shape
    out = torch.empty((num_columns, num_rows), dtype=dtype, device=values.device)
    for first in range(0, num_columns, _ROWS):
        part = slice(first, first + _ROWS)
        own = groups[part]
        out[part] = (values[part] - points[own]) * scales[own].float()
    return out.T.contiguous()
