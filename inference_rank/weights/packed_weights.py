# SPDX-License-Identifier: Apache-2.0
"""Matrices of integers in a model's safetensors, several to a word: AWQ, GPTQ and relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.models.weight_formats import WeightFormat

from .dequantize import dequantize_groups, unpack
from .stored_tensors import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of a packed matrix's parts, and which way they lie."""

    codes: str = "qweight"
    scales: str = "scales"
    zeros: str = "qzeros"
    groups: str = "g_idx"
    """Ends of the tensors' names. Without `zeros` zero points are in the middle of the range."""
    rows_first: bool = False
    """Whether the first dimension is that of the matrix's rows; else that of its columns."""
    rows_in_word: bool = False
    """Whether a word of `codes` has several rows, and not several columns."""
    order: tuple[int, ...] = ()
    """Which bits of a word, counted from the lowest, hold each of its integers; see `unpack`."""

    def shape(self, columns: int, rows: int) -> tuple[int, int]:
        """Return the shape of a part that has so many of both."""
        return (rows, columns) if self.rows_first else (columns, rows)

    def read(self, stored: StoredTensor, rows: range) -> torch.Tensor:
        """Return rows of a part ``[columns, rows]``, whichever way it lies."""
        if self.rows_first:
            return stored.read(rows).T.contiguous()
        return stored.read(columns=rows)


LAYOUTS: Mapping[str, Layout] = {
    "awq": Layout(rows_in_word=True, order=(0, 4, 1, 5, 2, 6, 3, 7)),
    "gptq": Layout(),
    "compressed": Layout(
        codes="weight_packed",
        scales="weight_scale",
        zeros="weight_zero_point",
        groups="weight_g_idx",
        rows_first=True,
    ),
}
"""By `WeightFormat.packing`."""


def check_packed(
    parts: Mapping[str, StoredTensor], found: WeightFormat, num_rows: int, num_columns: int
) -> None:
    """Check the headers of a packed matrix.

    Raises `ValueError`, with what is wrong, or `UnsupportedModelError` if a tensor has another
    shape.
    """
    layout = LAYOUTS[found.packing]
    needed = [layout.codes, layout.scales]
    if found.packing != "compressed" or not found.is_symmetric:
        needed.append(layout.zeros)
    missing = [name for name in needed if name not in parts]
    if missing:
        raise ValueError(f"{next(iter(parts.values())).name} has no {', '.join(missing)} beside it")
    stored = {name: parts[name].dtype for name in (layout.codes, layout.zeros) if name in parts}
    if set(stored.values()) != {"I32"}:
        raise ValueError(f"{parts[layout.codes].name} is not packed in words of 32 bits ({stored})")
    bits = _bits_of(parts, layout, num_rows, num_columns)
    if bits not in (4, 8) or (layout.rows_in_word and bits != 4):
        raise ValueError(f"{parts[layout.codes].name} is not of 4 or 8 bits")
    scales = parts[layout.scales]
    num_groups = scales.shape[1 if layout.rows_first else 0] if len(scales.shape) == 2 else 0
    if not num_groups or num_columns % num_groups:
        raise ValueError(f"{num_groups} groups do not divide {num_columns} columns")
    scales.check(layout.shape(num_groups, num_rows))
    words = num_rows * bits // 32
    parts[layout.codes].check(
        layout.shape(num_columns, words)
        if layout.rows_in_word
        else layout.shape(num_columns * bits // 32, num_rows)
    )
    if layout.zeros in needed:
        parts[layout.zeros].check(layout.shape(num_groups, words))
    if layout.groups in parts:
        parts[layout.groups].check((num_columns,))


def read_packed(
    parts: Mapping[str, StoredTensor],
    found: WeightFormat,
    rows: range,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return rows ``[len(rows), num_columns]`` of a matrix that `check_packed` has let pass.

    Its format is `found`, and its whole `shape` rows and columns. GPTQ's first version stores one
    less than the zero points that its kernels subtract. Raises `ValueError` if the rows are no
    whole words, or a column has no group.
    """
    layout = LAYOUTS[found.packing]
    bits = _bits_of(parts, layout, *shape)
    words = _words(rows, 32 // bits)
    scales = layout.read(parts[layout.scales], rows).to(device)
    if found.is_symmetric:  # as SGLang's Marlin kernel, which does not read them
        points = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int32, device=device)
    else:
        zeros = layout.read(parts[layout.zeros], words).to(device)
        points = unpack(zeros, bits, layout.order).flatten(1) + found.zero_offset
    groups = parts[layout.groups].read().to(device) if layout.groups in parts else None
    if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
        raise ValueError(f"{parts[layout.groups].name} names groups beyond its {len(scales)}")
    codes = layout.read(parts[layout.codes], words if layout.rows_in_word else rows).to(device)
    values = unpack(codes, bits, layout.order)
    values = values.flatten(1) if layout.rows_in_word else values.transpose(1, 2).flatten(0, 1)
    return dequantize_groups(values, points, scales, groups, dtype=dtype)


def _bits_of(
    parts: Mapping[str, StoredTensor], layout: Layout, num_rows: int, num_columns: int
) -> int:
    codes = parts[layout.codes].shape
    if len(codes) != 2:
        return 0
    if layout.rows_in_word:
        return 32 * codes[0 if layout.rows_first else 1] // num_rows
    return 32 * codes[1 if layout.rows_first else 0] // num_columns


def _words(rows: range, per_word: int) -> range:
    if rows.start % per_word or rows.stop % per_word:
        raise ValueError(
            f"rows {rows.start} to {rows.stop} are no whole words of {per_word} (use another --tp)"
        )
    return range(rows.start // per_word, rows.stop // per_word)
