# SPDX-License-Identifier: Apache-2.0
"""The KV of every request, by slot.

Pools are ``[num_slots, num_kv_heads, head_dim]`` per layer, for K and V, committed by the
operating system as they are touched. Slot 0 is padding and holds zeros. A free is a hint: it
changes what counts as a stale read, and nothing else.
"""

from __future__ import annotations

import torch

from tandemkv.kernels.quantize import quantize_int8

from .counters import Counters
from .protocol.errors import ProtocolError
from .protocol.model_spec import ModelSpec


def bytes_per_token(model: ModelSpec, index_dtype: str) -> int:
    """Bytes that one token occupies over all layers, with its key index."""
    width = model.num_kv_heads * model.head_dim
    size = 2 * width * torch.empty(0, dtype=getattr(torch, model.dtype)).element_size()
    if index_dtype == "int8":
        size += width + 4 * model.num_kv_heads
    return size * model.num_layers


class KVStore:
    """K and V pools, the optional int8 key index, and which slots are written.

    Parameters
    ----------
    model : ModelSpec
        Shape and dtype.
    num_slots : int
        Slots, the padding slot 0 included.
    index_dtype : {"native", "int8"}
        Precision of the keys that selection scans.
    poison : bool
        Fill freed slots with NaN.
    counters : Counters
        `slots_live`, `slots_free` and `stale_reads_total` are kept.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        num_slots: int,
        index_dtype: str,
        poison: bool,
        counters: Counters,
    ) -> None:
        self.num_slots = num_slots
        self._poison = poison
        self._counters = counters
        shape = (num_slots, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, model.dtype)
        layers = range(model.num_layers)
        self.k = [torch.empty(shape, dtype=dtype) for _ in layers]
        self.v = [torch.empty(shape, dtype=dtype) for _ in layers]
        is_int8 = index_dtype == "int8"
        self._k_int8 = [torch.empty(shape, dtype=torch.int8) for _ in layers if is_int8]
        self._k_scale = [torch.empty(shape[:2]) for _ in layers if is_int8]
        self._live = torch.zeros(num_slots, dtype=torch.bool)
        self._num_live = 0
        for pool in (*self.k, *self.v, *self._k_int8, *self._k_scale):
            pool[0] = 0
        self._count()

    def index(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys that selection scans, and their scales ``[num_slots, H]`` if quantised."""
        if self._k_int8:
            return self._k_int8[layer], self._k_scale[layer]
        return self.k[layer], None

    def put(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows ``[n, H, D]`` of one layer at `slots` ``[n]`` int64; slot 0 is skipped.

        Layer 0, which comes first, makes the slots live.
        """
        if bool((slots == 0).any()):
            kept = slots != 0
            slots, k, v = slots[kept], k[kept], v[kept]
        if not len(slots):
            return
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)
        if self._k_int8:
            quantised, scale = quantize_int8(k)
            self._k_int8[layer].index_copy_(0, slots, quantised)
            scales = self._k_scale[layer]
            scales.index_copy_(0, slots, scale.reshape(len(slots), -1).to(scales.dtype))
        if layer == 0:
            self._num_live += len(slots[~self._live[slots]].unique())
            self._live[slots] = True
            self._count()

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return K and V ``[2, n, H, D]`` at `slots` ``[n]`` int64, in a new tensor."""
        out = torch.empty((2, len(slots), *self.k[layer].shape[1:]), dtype=self.k[layer].dtype)
        torch.index_select(self.k[layer], 0, slots, out=out[0])
        torch.index_select(self.v[layer], 0, slots, out=out[1])
        return out

    def note_read(self, slots: torch.Tensor) -> None:
        """Count the reads of slots that were not written since they were last freed."""
        stale = ~self._live[slots.long()] & (slots != 0)
        self._counters.stale_reads_total += int(stale.sum())

    def free(self, slots: torch.Tensor) -> None:
        """Note that `slots` ``[n]`` int32 may be reused.

        Raises
        ------
        ProtocolError
            If an id is outside the store.
        """
        slots = slots.long()
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_slots:
            raise ProtocolError(f"freed slot ids must be within 0..{self.num_slots - 1}")
        slots = slots[slots != 0]
        self._num_live -= len(slots[self._live[slots]].unique())
        self._live[slots] = False
        if self._poison:
            self._fill_nan(slots)
        self._count()

    def clear(self) -> None:
        """Free every slot."""
        self.free(self._live.nonzero()[:, 0])

    def _fill_nan(self, slots: torch.Tensor) -> None:
        for pool in (*self.k, *self.v, *self._k_scale):
            pool[slots] = float("nan")

    def _count(self) -> None:
        self._counters.slots_live = self._num_live
        self._counters.slots_free = self.num_slots - 1 - self._num_live
