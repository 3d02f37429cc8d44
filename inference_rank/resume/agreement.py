# SPDX-License-Identifier: Apache-2.0
"""How the schedulers of a tensor-parallel group decide as one.

SGLang's run in lockstep: each turn they get the same requests and make the same pass, whose layers
exchange sums. Each has a cache rank of its own, and one of these may be lost. Whatever follows from
that has to follow on all ranks, in the same turn: one that paused, or did a pass again, alone would
leave the others in the middle of an exchange.
"""

from __future__ import annotations

from typing import Any

from tandemkv.cache_rank.protocol.all_reduce import all_reduce_max


class Agreement:
    """Makes one answer of those of all ranks. Every rank asks the same in the same order.

    Without `group`, torch's process group of CPUs, or alone in it, a rank agrees with itself, and
    nothing is sent.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.is_alone = group is None or group.size() == 1

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on a rank; waits for the others."""
        return bool(self._largest(float(flag)))

    def all(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank; waits for the others."""
        return not self._largest(float(not flag))

    def total(self, count: int) -> int:
        """Sum of what each rank counts; waits for the others."""
        if self.is_alone:
            return count
        own, ranks = self._group.rank(), range(self._group.size())
        figures = [float(count) if rank == own else 0.0 for rank in ranks]
        return int(sum(all_reduce_max(self._group, figures)))

    def _largest(self, value: float) -> float:
        return all_reduce_max(self._group, [value])[0]
