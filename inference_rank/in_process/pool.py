# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool with the resident sets behind it, in the same tensors.

Attention kernels take one base address and a list of slots. With the resident sets at the end
of the pool such a list may name both: resident rows first, then the latest tokens where SGLang
wrote them. So there is no ring to copy into, and requests that are attended to as a whole need
no resident set at all.
"""

from __future__ import annotations

from typing import Any

from tandemkv.cache_rank.protocol.settings import SelectionSettings


def make_local_pool_class(base: type, num_extra: int) -> type:
    """Return a subclass of SGLang's ``MHATokenToKVPool`` with `num_extra` more slots per layer.

    SGLang's allocator does not know them: it goes by the pool's `size`, which stays.
    """

    class LocalKVPool(base):
        """K/V of all requests, and of the resident sets."""

        tandemkv_extra_slots = num_extra

        def _create_buffers(self) -> None:
            size = self.size
            self.size = size + num_extra
            try:
                super()._create_buffers()
            finally:
                self.size = size

        def _finalize_allocation_log(self, num_tokens: int) -> None:
            super()._finalize_allocation_log(num_tokens + num_extra)

    return LocalKVPool


def resident_slots(selection: SelectionSettings, max_rows1: int, page_size: int) -> int:
    """Slots that the resident sets of `max_rows1` rows take, rounded up to whole pages."""
    return -(-selection.num_resident * max_rows1 // page_size) * page_size


def token_slots(pool: Any) -> int:
    """Slots of `pool` that hold tokens, its padding page included."""
    return int(pool.size) + int(pool.page_size)
