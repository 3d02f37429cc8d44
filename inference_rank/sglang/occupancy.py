# SPDX-License-Identifier: Apache-2.0
"""What requests occupy: rows and slots, by SGLang's own books."""

from __future__ import annotations

from typing import Any


class Occupancy:
    """Rows and slots in use, read without waiting, by any thread.

    Slots of the radix cache count as used. While the scheduler is at work a value may be that of a
    moment ago.
    """

    def __init__(self, runner: Any) -> None:
        self._rows, self._slots = runner.req_to_token_pool, runner.token_to_kv_pool_allocator

    def values(self) -> dict[str, float]:
        """Return ``request_rows``, ``slots_used`` and ``slots_total``."""
        total = int(self._slots.size)
        return {
            "request_rows": float(self._rows.size - self._rows.available_size()),
            "slots_used": float(total - self._slots.available_size()),
            "slots_total": float(total),
        }
