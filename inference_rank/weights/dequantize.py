# SPDX-License-Identifier: Apache-2.0
"""Rows of a quantised matrix as numbers, from the layouts of checkpoints.

Every result is the product of stored numbers in float32, rounded once more to the dtype that is
asked for. The product of a float8, or of a small integer, and a scale is exact in float64. So the
result is that of float64, rounded to float32 and to the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS = 512
"""Rows worked out at once: their float32 temporaries are a few times the result."""


def dequantize_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    first_row: int,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``weight * scale`` ``[num_rows, num_columns]`` in `dtype`, on their device.

    Parameters
    ----------
    weight : torch.Tensor
        ``[num_rows, num_columns]``, float8_e4m3fn: rows of a matrix from `first_row` on, which need
        not be the first of a block.
    scale : torch.Tensor
        Of the whole matrix, float. With `block`, rows and columns that share a scale,
        ``[row_blocks, column_blocks]``, the last ones of which may be partly outside of the matrix.
        Else one number, or one for each row of the matrix.
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


def dequantize_groups(
    values: torch.Tensor,
    points: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``((values - points[groups]) * scales[groups]).T`` in `dtype`, dense.

    Parameters
    ----------
    values : torch.Tensor
        ``[num_columns, num_rows]``, int32: a matrix, transposed.
    points, scales : torch.Tensor
        ``[num_groups, num_rows]``: zero points, int32, and scales, float.
    groups : torch.Tensor, optional
        ``[num_columns]``, int32, from 0 and below ``num_groups``: the group of each column, which
        is in any order where activations were sorted (``desc_act``). Without it a group is
        ``num_columns / num_groups`` columns.
    """
    num_columns, num_rows = values.shape
    if groups is None:
        groups = torch.arange(num_columns, device=values.device) // (num_columns // len(points))
    groups = groups.long()
    out = torch.empty((num_columns, num_rows), dtype=dtype, device=values.device)
    for first in range(0, num_columns, _ROWS):
        part = slice(first, first + _ROWS)
        own = groups[part]
        out[part] = (values[part] - points[own]) * scales[own].float()
    return out.T.contiguous()


def unpack(words: torch.Tensor, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return ``[..., 32 / bits]`` non-negative integers of each word, int32.

    `order` is the place of each in the word, counted from the lowest bits; by default as they come.
    """
    places = tuple(order or range(32 // bits))
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device) * bits
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
