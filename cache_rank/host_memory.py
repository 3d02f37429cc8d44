# SPDX-License-Identifier: Apache-2.0
"""Whether the host has room for the store, before anything is promised to an inference rank."""

from __future__ import annotations

from .protocol.available_memory import available_bytes
from .protocol.errors import SettingsError
from .protocol.model_spec import ModelSpec
from .protocol.settings import RankSettings
from .store import bytes_per_token

_GIB = 1 << 30


def check_memory(model: ModelSpec, settings: RankSettings, *, num_slots: int) -> None:
    """Refuse a store that does not fit.

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
    free = available_bytes()
    if free is None:
        return
    per_token = bytes_per_token(model, settings.selection.index_dtype)
    wanted = per_token * num_slots
    if wanted > free:
        raise SettingsError(
            f"cache.capacity_tokens={settings.cache.capacity_tokens} needs "
            f"{wanted / _GIB:.2f} GiB ({per_token} bytes a token in {model.dtype}), the host has "
            f"{free / _GIB:.2f} GiB available; at most {max(0, free) // per_token} tokens fit"
        )
