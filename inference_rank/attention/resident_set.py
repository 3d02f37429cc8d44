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

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .sample_set import SampleSet, zeros_on


class ResidentSet:
    """Resident K/V of all rows. Its size does not depend on any context length.

    `allocate` makes its tensors, ``resident_*`` and ``sample_*``, where another process maps them;
    without it they are memory of this process, on `device`.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[num_layers, max_rows + 1, R + ring, num_kv_heads, head_dim]``. Row 0 is padding.
    samples : SampleSet or None
        What stands for the rest, if the settings ask for it.
    """

    def __init__(
        self,
        model: ModelSpec,
        selection: SelectionSettings,
        max_rows: int,
        device: torch.device,
        allocate: Allocate | None = None,
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
        dtype, allocate = getattr(torch, model.stored_dtype), allocate or zeros_on(device)
        # Zeros, not empty: masked slots still enter the weighted sum, as 0 * value.
        self.k = allocate("resident_k", shape, dtype)
        self.v = allocate("resident_v", shape, dtype)
        self.samples: SampleSet | None = None
        if selection.num_samples:
            self.samples = SampleSet(model, selection, max_rows, allocate)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, and of the samples."""
        samples = self.samples.nbytes if self.samples is not None else 0
        return self.k.nbytes + self.v.nbytes + samples

    def is_dense(self, length: int) -> bool:
        """Whether a request of `length` tokens is wholly resident without any selection."""
        return self._dense_while_fits and length <= self.num_slots
