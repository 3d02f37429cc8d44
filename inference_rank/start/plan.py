# SPDX-License-Identifier: Apache-2.0
"""What was measured at start, where the engine is on the model's own GPU or on the CPU.

A selection runs beside the forward pass, and takes time from it: all of it counts as exposed (on a
GPU at most that: part of it fills gaps).
"""

from __future__ import annotations

from dataclasses import dataclass

from tandemkv.cache_rank.protocol.engine import SelectionTime
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .layer_time import LayerTime

TOLERANCE = 0.05
"""Part of a layer's time that a selection may expose and still count as hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """How the server selects, and why. Times are in us per layer."""

    placement: str
    selection: SelectionTime | None
    """None if nothing is selected, or if it could not be measured; `note` says which."""
    layer: LayerTime | None
    """None where nothing is selected."""
    refresh_every: int
    """Steps from one that selects to the next."""
    dense_tokens: int
    """Requests up to this length are attended to as a whole."""
    dense_batch_tokens: int = 0
    """So are all of a step of no more tokens in all; 0: not for that reason."""
    exposed_us: float | None = None
    """What a layer's selection adds to its step, averaged over the steps of a refresh."""
    note: str = ""
    """What the table does not say."""

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
            "plan_refresh_steps": float(self.refresh_every),
            "plan_dense_tokens": float(self.dense_tokens),
        }
        if self.dense_batch_tokens:
            found["plan_dense_batch_tokens"] = float(self.dense_batch_tokens)
        if self.selection is not None:
            found["plan_scan_us"] = self.selection.scan_us
            found["plan_transfer_us"] = self.selection.transfer_us
        if self.layer is not None and self.layer.us is not None:
            found["plan_layer_us"] = self.layer.us
        if self.exposed_us is not None:
            found["plan_exposed_us"] = self.exposed_us
        if self.is_hidden is not None:
            found["plan_is_hidden"] = float(self.is_hidden)
        return found

    def info(self) -> dict[str, str]:
        """Words for the status endpoint."""
        load = self.selection
        return {
            "plan_placement": self.placement,
            "plan_load": f"{load.batch} x {load.context}" if load is not None else "",
            "plan_layer_counts": self.layer.counted if self.layer is not None else "",
            "plan_note": self.note,
        }

    def text(self) -> str:
        """One line for the log."""
        values = ", ".join(f"{k.removeprefix('plan_')}={v:.6g}" for k, v in self.values().items())
        words = ", ".join(f"{k.removeprefix('plan_')}: {v}" for k, v in self.info().items() if v)
        return f"{values} ({words})"


def make_plan(
    selection: SelectionSettings,
    *,
    measured: SelectionTime | None,
    layer: LayerTime | None,
    is_cuda: bool,
    dense_tokens: int,
    scanned: float = 1.0,
    reason: str = "",
) -> StartPlan:
    """Say what a selection adds to a step.

    Requests of up to `dense_tokens` are attended to as a whole. `scanned` is the share of the
    selecting layers that are scanned: others take what one of them chose, and are counted with the
    transfer alone. `reason`: why nothing was measured, if so.
    """
    exposed: float | None = None
    if measured is not None and layer is not None and layer.us is not None:
        mean = scanned * measured.total_us + (1 - scanned) * measured.transfer_us
        exposed = mean / selection.refresh_steps
    return StartPlan(
        placement="the model's GPU" if is_cuda else "CPU",
        selection=measured,
        layer=layer,
        refresh_every=selection.refresh_steps,
        dense_tokens=dense_tokens,
        dense_batch_tokens=selection.dense_batch_tokens or 0,
        exposed_us=exposed,
        note=reason,
    )
