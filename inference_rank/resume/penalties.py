# SPDX-License-Identifier: Apache-2.0
"""The tokens that SGLang's penalties of a request were made of, so that they can be made again.

SGLang adds a request's latest token when it prepares a decode step. With the overlap scheduler that
is before the token of the step before is known, so it cannot be told from the request which tokens
were added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch


class PenaltyLog:
    """Tokens added for each request that runs with one that has a penalty."""

    def __init__(self) -> None:
        self._added: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._next: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def add(self, original: Callable[..., None], batch: Any) -> None:
        """Add the latest tokens (`ScheduleBatch.cumulate_penalty_output_tokens`), noting them.

        After `rewind` those that were added the first time are added again.
        """
        tokens = [self._latest(req) for req in batch.reqs]
        if any(req in self._next for req in batch.reqs):
            added = [self._next.pop(r, t) for r, t in zip(batch.reqs, tokens, strict=True)]
            orchestrator = batch.sampling_info.penalizer_orchestrator
            orchestrator.cumulate_output_tokens(
                torch.tensor(added, dtype=torch.int64, device=batch.device)
            )
            tokens = added
        else:
            original(batch)
        for req, token in zip(batch.reqs, tokens, strict=True):
            self._added.setdefault(req, []).append(token)

    def rewind(self, req: Any, steps: int) -> None:
        """Take back what the last `steps` decode steps of `req` have added."""
        added = self._added.get(req, [])
        if steps and len(added) >= steps:
            self._next[req] = added[-steps]
            del added[-steps:]

    def forget(self, req: Any) -> None:
        """Forget a request that begins anew."""
        self._added.pop(req, None)
        self._next.pop(req, None)

    def replay(self, req: Any, batch: Any) -> None:
        """Bring the new penalties of `batch`, which has `req` alone, to where they were."""
        orchestrator = batch.sampling_info.penalizer_orchestrator
        for token in self.tokens(req):
            orchestrator.cumulate_output_tokens(
                torch.tensor([token], dtype=torch.int64, device=batch.device)
            )

    def tokens(self, req: Any) -> Sequence[int]:
        """Return what was added for `req`, in order."""
        return tuple(self._added.get(req, ()))

    def _latest(self, req: Any) -> int:
        return int(req.output_ids[-1] if len(req.output_ids) else req.origin_input_ids[-1])
