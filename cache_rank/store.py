# SPDX-License-Identifier: Apache-2.0
"""The KV of every request, by slot.

Pools are ``[num_slots, num_kv_heads, head_dim]`` per layer, for K and V, committed by the
operating system as they are touched; on a GPU all at once, with zeros. Slot 0 is padding and
holds zeros. A free is a hint: it
changes what counts as a stale read, and nothing else.
"""

from __future__ import annotations

import torch

from tandemkv.kernels.quantize import quantize_int8

from .counters import Counters
from .protocol.errors import ProtocolError
from .protocol.model_spec import ModelSpec
from .protocol.tally import DeviceTally

_CPU = torch.device("cpu")


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
        `slots_live`, `slots_free` and `stale_reads_total` are kept; on a GPU brought up to date by
        `flush_counters`.
    device : torch.device
        Where the pools are, and every tensor of slots that is handed in.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        num_slots: int,
        index_dtype: str,
        poison: bool,
        counters: Counters,
        device: torch.device = _CPU,
    ) -> None:
        self.num_slots = num_slots
        self.device = device
        self._poison = poison
        self._tally = DeviceTally(
            counters, ("stale_reads_total",), device, gauges=("slots_live", "slots_free")
        )
        shape = (num_slots, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, model.dtype)
        layers = range(model.num_layers)
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.k = [make(shape, dtype=dtype, device=device) for _ in layers]
        self.v = [make(shape, dtype=dtype, device=device) for _ in layers]
        indexed = layers if index_dtype == "int8" else range(0)
        self._k_int8 = [make(shape, dtype=torch.int8, device=device) for _ in indexed]
        self._k_scale = [make(shape[:2], dtype=torch.float32, device=device) for _ in indexed]
        self._live = torch.zeros(num_slots, dtype=torch.bool, device=device)
        for pool in (*self.k, *self.v, *self._k_int8, *self._k_scale):
            pool[0] = 0
        self._count()

    def index(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys that selection scans, and their scales ``[num_slots, H]`` if quantised."""
        if self._k_int8:
            return self._k_int8[layer], self._k_scale[layer]
        return self.k[layer], None

    def put(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows ``[n, H, D]`` of one layer at `slots` ``[n]`` int64; slot 0 stays zeros.

        Layer 0, which comes first, makes the slots live.
        """
        if not len(slots):
            return
        is_padding = (slots == 0).view(-1, 1, 1)
        k, v = k.masked_fill(is_padding, 0), v.masked_fill(is_padding, 0)
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)
        if self._k_int8:
            quantised, scale = quantize_int8(k)
            self._k_int8[layer].index_copy_(0, slots, quantised)
            scales = self._k_scale[layer]
            scales.index_copy_(0, slots, scale.reshape(len(slots), -1).to(scales.dtype))
        if layer == 0:
            self._live[slots] = True
            self._live[0] = False
            self._count()

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return K and V ``[2, n, H, D]`` at `slots` ``[n]`` int64, in a new tensor."""
        pool = self.k[layer]
        out = torch.empty((2, len(slots), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
        torch.index_select(self.k[layer], 0, slots, out=out[0])
        torch.index_select(self.v[layer], 0, slots, out=out[1])
        return out

    def note_read(self, slots: torch.Tensor) -> None:
        """Count the reads of slots that were not written since they were last freed."""
        stale = ~self._live[slots.long()] & (slots != 0)
        self._tally.add("stale_reads_total", stale.sum())

    def flush_counters(self) -> None:
        """Enter what is known by now into the counters."""
        self._tally.flush()

    def free(self, slots: torch.Tensor) -> None:
        """Note that `slots` ``[n]`` int32 may be reused.

        Raises
        ------
        ProtocolError
            If an id is outside the store.
        """
        slots = slots.long()
        # One wait for the GPU a hint, none in a step.
        low, high = (int(x) for x in torch.aminmax(slots)) if len(slots) else (0, 0)
        if low < 0 or high >= self.num_slots:
            raise ProtocolError(f"freed slot ids must be within 0..{self.num_slots - 1}")
        if self._poison:
            slots = slots[slots != 0]
            self._fill_nan(slots)
        self._live[slots] = False
        self._count()

    def clear(self) -> None:
        """Free every slot."""
        if self._poison:
            self._fill_nan(self._live.nonzero()[:, 0])
        self._live.zero_()
        self._count()

    def _fill_nan(self, slots: torch.Tensor) -> None:
        for pool in (*self.k, *self.v, *self._k_scale):
            pool[slots] = float("nan")

    def _count(self) -> None:
        num_live = self._live.count_nonzero()
        self._tally.set("slots_live", num_live)
        self._tally.set("slots_free", self.num_slots - 1 - num_live)
