# SPDX-License-Identifier: Apache-2.0
"""The K/V that a request attends to on the inference rank: resident slots and a recent ring.

Per layer and row there are ``R`` resident slots and a ring of ``num_recent_tokens`` slots.
While a request has at most ``R + ring`` tokens it is *dense*: token i sits in slot i, later
ones in ring slot ``R + (i - R) mod ring``. Beyond that it is *sparse*: the ring holds the
latest tokens, and the cache rank decides which token each KV head keeps in each resident
slot. Keys carry RoPE already, so the order of slots is irrelevant to attention.
"""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import SelectionSettings
from tandemkv.kernels.append import SampleMoves, append_tokens
from tandemkv.kernels.placing import place
from tandemkv.kernels.samples import newest_sample

from .sample_set import SampleSet


class ResidentSet:
    """Resident K/V of all rows. Its size does not depend on any context length.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[num_layers, max_rows + 1, R + ring, num_kv_heads, head_dim]``. Row 0 is padding.
    positions : torch.Tensor
        ``[num_layers, max_rows + 1, num_kv_heads, R + ring]`` int32, logical position in each
        resident slot, -1 where empty and in the ring; for probes and status only.
    samples : SampleSet or None
        What stands for the rest, if the settings ask for it.
    """

    def __init__(
        self, model: ModelSpec, selection: SelectionSettings, max_rows: int, device: torch.device
    ) -> None:
        self.num_resident = selection.num_resident
        self.ring = selection.num_recent_tokens
        self.num_slots = self.num_resident + self.ring
        self._dense_while_fits = selection.keeps_dense_while_fits
        shape = (
            model.num_layers,
            max_rows + 1,
            self.num_slots,
            model.num_kv_heads,
            model.head_dim,
        )
        dtype = getattr(torch, model.dtype)
        # Zeros, not empty: masked slots still enter the weighted sum, as 0 * value.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.full(
            (model.num_layers, max_rows + 1, model.num_kv_heads, self.num_slots),
            -1,
            dtype=torch.int32,
            device=device,
        )
        self._slots = torch.arange(self.num_slots, device=device)
        self.samples: SampleSet | None = None
        if selection.num_samples:
            self.samples = SampleSet(model, selection, max_rows, device)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, and of the samples."""
        samples = self.samples.nbytes if self.samples is not None else 0
        return self.k.nbytes + self.v.nbytes + samples

    def is_dense(self, length: int) -> bool:
        """Whether a request of `length` tokens is wholly resident without any selection."""
        return self._dense_while_fits and length <= self.num_slots

    def ring_slot(self, position: int) -> int:
        """Slot of `position` in the ring."""
        return self.num_resident + (position - self.num_resident) % self.ring

    def write_slot(self, length: int) -> int:
        """Slot of the newest token of a request of `length` tokens."""
        return self._slot(length - 1, length)

    def _slot(self, position: int, length: int) -> int:
        """Slot of one of the latest tokens of a request, or of any if it is dense."""
        if self.is_dense(length) and position < self.num_resident:
            return position
        return self.ring_slot(position)

    def sample_moves(self, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return which samples tokens become that leave the ring, -1 for none, and their slots.

        Each is ``[len(lengths)]`` int64; None if there are no samples. Valid before the newest
        token of each request is appended.
        """
        if self.samples is None:
            return None
        counts = [self.samples.num_candidates(n) for n in lengths]
        moved = [newest_sample(n, self.samples.num_samples) if n else -1 for n in counts]
        sources = [self._slot(max(0, n - self.ring - 1), n) for n in lengths]
        device = self._slots.device
        return place(moved, device), place(sources, device)

    def visible(self, lengths: list[int]) -> torch.Tensor:
        """Slots that a decode step attends to, ``[len(lengths), R + ring]`` bool."""
        # Slots [0, filled) and those of the ring; of a dense request [0, length) in all.
        is_dense = [self.is_dense(n) for n in lengths]
        filled = [
            n if dense else min(self.num_resident, max(0, n - self.ring))
            for n, dense in zip(lengths, is_dense, strict=True)
        ]
        in_ring = [0 if dense else n for n, dense in zip(lengths, is_dense, strict=True)]
        ends = place(filled, self._slots.device).unsqueeze(-1)
        return (self._slots < ends) | self.visible_ring(in_ring)

    def num_visible(self, length: int) -> int:
        """Tokens that a decode step of a request attends to, at most."""
        if self.is_dense(length):
            return length
        candidates = max(0, length - self.ring)
        filled = min(self.num_resident, candidates)
        samples = self.samples.num_samples if self.samples is not None else 0
        return filled + min(length, self.ring) + min(samples, candidates - filled)

    def visible_ring(self, lengths: list[int]) -> torch.Tensor:
        """Slots of the ring, ``[len(lengths), R + ring]`` bool: the exact step's local part."""
        first = (0 - self.num_resident) % self.ring
        place_in_ring = (self._slots - self.num_resident - first) % self.ring
        ends = place(lengths, self._slots.device).unsqueeze(-1)
        return (self._slots >= self.num_resident) & (place_in_ring < ends)

    def append(
        self, layer: int, rows: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        *, moves: SampleMoves | None = None, awaited: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the newest token of each row.

        Parameters
        ----------
        layer : int
            Layer to write.
        rows, slots : torch.Tensor
            ``[B]`` int64.
        k, v : torch.Tensor
            ``[B, num_kv_heads, head_dim]``.
        moves : SampleMoves, optional
            What becomes a sample, before it is overwritten.
        awaited : torch.Tensor, optional
            ``[n]`` int32 flags that what is queued next waits for.
        """
        append_tokens(k, v, rows, slots, self.k[layer], self.v[layer], moves=moves, awaited=awaited)

    def fill_from_prompt(self, layer: int, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy a finished prompt's tokens that need no selection.

        Dense: all of them. Sparse: the ring, and the first ``R`` tokens as a start for
        policies and layers that never select (streaming's sinks).

        Parameters
        ----------
        layer, row : int
            Where to write.
        k, v : torch.Tensor
            ``[length, num_kv_heads, head_dim]``, the whole prompt.
        """
        length = k.shape[0]
        head = min(length, self.num_resident)
        if not self.is_dense(length):
            head = min(head, max(0, length + 1 - self.ring))
        self.k[layer, row, :head] = k[:head]
        self.v[layer, row, :head] = v[:head]
        self.positions[layer, row] = -1
        self.positions[layer, row, :, :head] = torch.arange(
            head, dtype=torch.int32, device=k.device
        )
        start = max(0, length - self.ring)
        if self.is_dense(length):
            start = max(start, self.num_resident)
        if start < length:
            recent = torch.arange(start, length, device=k.device)
            slots = self.num_resident + (recent - self.num_resident) % self.ring
            self.k[layer, row, slots] = k[start:]
            self.v[layer, row, slots] = v[start:]
        if self.samples is not None:
            self.samples.fill(layer, row, k, v)

    def seed(
        self, layer: int, row: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Fill a sparse row's resident slots from its prompt.

        Parameters
        ----------
        layer, row : int
            Where to write.
        positions : torch.Tensor
            ``[num_kv_heads, R]`` int32, position for each slot, -1 for none.
        k, v : torch.Tensor
            ``[length, num_kv_heads, head_dim]``, the whole prompt.
        """
        index = positions.clamp_min(0).to(torch.int64).t()  # [R, H]
        heads = torch.arange(index.shape[1], device=k.device)
        self.k[layer, row, : self.num_resident] = k[index, heads]
        self.v[layer, row, : self.num_resident] = v[index, heads]
        self.positions[layer, row, :, : self.num_resident] = positions
