# SPDX-License-Identifier: Apache-2.0
"""What a run of decode steps gives, whichever program ran them."""

from __future__ import annotations

from dataclasses import dataclass

from tandemkv.server.evaluation.spread import Spread


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A batch of requests of one context length."""

    batch: int
    context: int

    @property
    def label(self) -> str:
        """Return e.g. ``8x64k``; contexts that are no multiple of 1024 in full."""
        whole, rest = divmod(self.context, 1024)
        return f"{self.batch}x{self.context if rest else f'{whole}k'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Decode steps of one point, in ms.

    `waited` are steps each of which was waited for; `queued` steps that were queued one behind
    another, as SGLang's overlap scheduler runs them, where that was measured. `devices` are the
    GPUs that worked, by name.
    """

    point: Point
    waited: Spread
    queued: Spread | None = None
    prefill_s: float | None = None
    devices: tuple[str, ...] = ()
