# SPDX-License-Identifier: Apache-2.0
"""Steps that have so little to attend to that searching it would take longer."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.engine import WARM_UP_STEPS, DenseLengths


class DenseSteps:
    """Up to which length requests are attended to as a whole, step by step.

    What selecting costs hardly depends on how many tokens there are, and what attending costs is
    their number, of all requests of a step together. So a step of few tokens attends to all of
    them, however long one request is. Nothing is selected meanwhile, and resident sets fall behind;
    when the load grows, they are made ready for `WARM_UP_STEPS` while their requests, and shorter
    ones, are attended to as a whole still, for the fetch cap bounds how fast they follow. Steps of
    up to `batch_tokens` tokens in all attend to everything (0: none for that reason); `base` holds
    for others.
    """

    def __init__(self, base: DenseLengths, batch_tokens: int) -> None:
        self.base = base
        self._batch_tokens = batch_tokens
        # A request that was alone may grow while its set is made ready.
        most = max(base.num_dense, batch_tokens + WARM_UP_STEPS if batch_tokens else 0)
        self._whole = DenseLengths(num_dense=most, num_cold=most)
        self._steps_left = 0
        self._behind: set[int] = set()

    @property
    def num_dense(self) -> int:
        """Longest request that any step attends to as a whole."""
        return self._whole.num_dense

    def of(self, lengths: torch.Tensor) -> DenseLengths:
        """Return what holds for the next step, of ``lengths [B]`` on the host, padding being 1."""
        if self._is_small(lengths):
            return self._whole
        behind = self._still_behind(lengths)
        if not behind:
            return self.base
        num_dense = max(self.base.num_dense, *behind)
        return DenseLengths(num_dense=num_dense, num_cold=self.base.num_cold)

    def advance(self, lengths: torch.Tensor) -> None:
        """Note that the step of `lengths` was begun."""
        if self._is_small(lengths):
            self._behind = set(lengths[lengths > self.base.num_cold].tolist())
            self._steps_left = WARM_UP_STEPS
            return
        self._behind = self._still_behind(lengths)
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._behind = set()

    def snapshot(self) -> tuple[int, frozenset[int]]:
        """Return what `advance` changes."""
        return self._steps_left, frozenset(self._behind)

    def rewind(self, state: tuple[int, frozenset[int]]) -> None:
        """Go back to where `snapshot` was asked."""
        self._steps_left, self._behind = state[0], set(state[1])

    def _still_behind(self, lengths: torch.Tensor) -> set[int]:
        """Return the lengths of requests whose sets fell behind.

        They are known by their lengths, which grow by one a step: rows are on the device only. A
        new request of such a length is taken for one of them, and waits for what it need not.
        """
        if not self._behind:
            return self._behind
        return {length + 1 for length in self._behind} & set(lengths.tolist())

    def _is_small(self, lengths: torch.Tensor) -> bool:
        if not self._batch_tokens:
            return False
        return sum(n for n in lengths.tolist() if n > 1) <= self._batch_tokens
