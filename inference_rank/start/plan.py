# SPDX-License-Identifier: Apache-2.0
"""What was measured at start, where the engine is on the model's own GPU or on the CPU.

A selection runs beside the forward pass, and takes time from it: all of it counts as exposed (on a
GPU at most that: part of it fills gaps).
"""

from __future__ import annotations

from dataclasses import dataclass

from tandemkv.cache_rank.protocol.engine import SelectionTime
from tandemkv.cache_rank.protocol.messages import RefreshRule
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .layer_time import LayerTime

TOLERANCE = 0.05
"""Part of a layer's time that a selection may expose and still count as hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """How the server selects, and why. Times are in us per layer."""

    settings: SelectionSettings
    measured: SelectionTime | None
    """None if nothing is selected, or if it could not be measured; `note` says which."""
    layer: LayerTime | None
    """None where nothing is selected."""
    is_cuda: bool
    dense_tokens: int
    """Requests up to this length are attended to as a whole."""
    scanned: float = 1.0
    """Share of the selecting layers that are scanned: others take what one of them chose, and are
    counted with the transfer alone."""
    note: str = ""
    """What the table does not say."""

    @property
    def exposed_us(self) -> float | None:
        """What a layer's selection adds to its step, averaged over the steps of a refresh.

        Where tokens decide when that is, it is what it adds to a step that selects.
        """
        if self.measured is None or self.layer is None or self.layer.us is None:
            return None
        found = self.measured
        mean = self.scanned * found.total_us + (1 - self.scanned) * found.transfer_us
        is_known = self.settings.declared.refresh is not RefreshRule.BOUNDARY
        return mean / self.settings.most_steps_between if is_known else mean

    @property
    def is_hidden(self) -> bool | None:
        """Whether selection adds next to nothing; None if that is not known."""
        layer_us = self.layer.us if self.layer is not None else None
        if self.exposed_us is None or layer_us is None:
            return None
        return self.exposed_us <= TOLERANCE * layer_us

    def values(self) -> dict[str, float]:
        """Gauges for the status endpoint; what is not known is missing."""
        found = {
            "plan_refresh_steps": float(self.settings.most_steps_between),
            "plan_dense_tokens": float(self.dense_tokens),
        }
        if self.settings.dense_batch_tokens:  # so are all of a step of no more tokens in all
            found["plan_dense_batch_tokens"] = float(self.settings.dense_batch_tokens)
        if self.measured is not None:
            found["plan_scan_us"] = self.measured.scan_us
            found["plan_transfer_us"] = self.measured.transfer_us
        if self.layer is not None and self.layer.us is not None:
            found["plan_layer_us"] = self.layer.us
        if self.exposed_us is not None:
            found["plan_exposed_us"] = self.exposed_us
        if self.is_hidden is not None:
            found["plan_is_hidden"] = float(self.is_hidden)
        return found

    def info(self) -> dict[str, str]:
        """Words for the status endpoint."""
        load = self.measured
        return {
            "plan_placement": "the model's GPU" if self.is_cuda else "CPU",
            "plan_load": f"{load.batch} x {load.context}" if load is not None else "",
            "plan_layer_counts": self.layer.counted if self.layer is not None else "",
            "plan_note": self.note,
        }

    def text(self) -> str:
        """One line for the log."""
        values = ", ".join(f"{k.removeprefix('plan_')}={v:.6g}" for k, v in self.values().items())
        words = ", ".join(f"{k.removeprefix('plan_')}: {v}" for k, v in self.info().items() if v)
        return f"{values} ({words})"
