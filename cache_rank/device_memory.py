# SPDX-License-Identifier: Apache-2.0
"""Whether the cache rank's GPU has room for the store and what selection works in."""

from __future__ import annotations

import torch

from .protocol.errors import SettingsError
from .protocol.model_spec import ModelSpec
from .protocol.settings import RankSettings
from .store import bytes_per_token

_GIB = 1 << 30
RESERVED_BYTES = 2 * _GIB
"""Left for NCCL's buffers, the weights of W_q (1.2 GiB for an 8B model), packs and scratch."""


def free_bytes() -> int:
    """Bytes of the current GPU that nobody uses."""
    torch.cuda.empty_cache()  # what an earlier store left in torch's cache is free too
    free: int = torch.cuda.mem_get_info()[0]
    return free


def check_device_memory(model: ModelSpec, settings: RankSettings, *, num_slots: int) -> None:
    """Refuse a store that does not fit the current GPU.

    Parameters
    ----------
    model : ModelSpec
        Shape and dtype.
    settings : RankSettings
        Its `index_dtype` counts.
    num_slots : int
        Tokens.

    Raises
    ------
    SettingsError
        With the numbers, and a capacity that fits.
    """
    free = free_bytes() - RESERVED_BYTES
    per_token = bytes_per_token(model, settings.selection.index_dtype)
    wanted = per_token * num_slots
    if wanted > free:
        raise SettingsError(
            f"cache.capacity_tokens={settings.cache.capacity_tokens} needs "
            f"{wanted / _GIB:.2f} GiB ({per_token} bytes a token in {model.dtype}), the cache "
            f"rank's GPU has {max(0, free) / _GIB:.2f} GiB beside {RESERVED_BYTES / _GIB:.0f} GiB "
            f"for buffers; at most {max(0, free) // per_token} tokens fit (--cache-tokens)"
        )
