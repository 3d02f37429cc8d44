# SPDX-License-Identifier: Apache-2.0
"""What was measured at start, and how often is selected for it.

A selection runs beside the forward pass. Whether it is hidden depends on the placement:

- on a GPU of its own (``peer``) it has the time of one layer of the model, per layer of a step;
- on the model's GPU, or on a CPU, it takes time from the model, so all of it counts as exposed
  (on one GPU at most that: part of it fills gaps).
"""

from __future__ import annotations

from dataclasses import dataclass

from tandemkv.cache_rank.protocol.engine import SelectionTime
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings import SelectionSettings

from .layer_time import LayerTime

MOST_REFRESH = 4
"""What a measurement may raise `refresh_every` to. Older sets cost quality, so it never goes on."""
TOLERANCE = 0.05
"""Part of a layer's time that a selection may expose and still count as hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """How the server selects, and why. Times are in us per layer.

    Attributes
    ----------
    placement : str
        Where selection runs.
    selection : SelectionTime or None
        None if nothing is selected, or if it could not be measured; `note` says which.
    layer : LayerTime or None
        None where nothing is selected.
    refresh_every : int
        What is used.
    dense_tokens : int
        Requests up to this length are attended to as a whole.
    dense_batch_tokens : int
        So are all of a step of no more tokens in all; 0: not for that reason.
    chosen : bool
        Whether `refresh_every` was raised here.
    exposed_us : float or None
        What a layer's selection adds to its step, averaged over the steps of a refresh.
    note : str
        What the table does not say.
    """

    placement: str
    selection: SelectionTime | None
    layer: LayerTime | None
    refresh_every: int
    dense_tokens: int
    dense_batch_tokens: int = 0
    chosen: bool = False
    exposed_us: float | None = None
    note: str = ""

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
    timing: Timing,
    *,
    measured: SelectionTime | None,
    layer: LayerTime | None,
    has_own_gpu: bool,
    is_cuda: bool,
    dense_tokens: int,
    scanned: float = 1.0,
    reason: str = "",
) -> StartPlan:
    """Choose `refresh_every` where it is left open, and say what is hidden.

    It is raised only for policies that select for a later step, on a GPU of their own, and only
    against the time of a captured decode step: until the average over `refresh_every` steps
    exposes at most `TOLERANCE` of a layer, or to `MOST_REFRESH`. On the model's own device
    nothing would hide a selection, and a policy that selects within the step is meant to be
    fresh.

    Parameters
    ----------
    selection : SelectionSettings
        What was asked for.
    timing : Timing
        When the policy's selections are used.
    measured, layer : SelectionTime, LayerTime, optional
        What was measured.
    has_own_gpu : bool
        Whether selection has a GPU of its own.
    is_cuda : bool
        Whether it runs on a GPU at all.
    dense_tokens : int
        Requests up to this length are attended to as a whole.
    scanned : float
        Share of the selecting layers that are scanned. Others take what one of them chose: they
        are counted with the transfer alone.
    reason : str
        Why nothing was measured, if so.
    """
    placement = "a GPU of its own" if has_own_gpu else "the model's GPU" if is_cuda else "CPU"
    refresh, note = selection.refresh_steps, reason
    exposed: float | None = None
    layer_us = layer.us if layer is not None else None
    if measured is not None and layer is not None and layer_us is not None:
        once = _exposed_once(
            measured, layer_us, timing, selection, has_own_gpu=has_own_gpu, scanned=scanned
        )
        may_raise = timing is Timing.NEXT_STEP and has_own_gpu and layer.of_graph
        if may_raise and selection.refresh_every is None and selection.dense_while_fits:
            refresh = _raised(refresh, once, layer_us)
        exposed = once / refresh
        if refresh != selection.refresh_steps:
            note = (
                f"refresh_every={refresh} was chosen, as selecting in every step would add "
                f"{once:.0f} us a layer: sets are up to {refresh} steps old, which costs quality; "
                "--refresh-every 1 turns it off"
            )
    return StartPlan(
        placement=placement,
        selection=measured,
        layer=layer,
        refresh_every=refresh,
        dense_tokens=dense_tokens,
        dense_batch_tokens=selection.dense_batch_tokens or 0,
        chosen=refresh != selection.refresh_steps,
        exposed_us=exposed,
        note=note,
    )


def _raised(refresh: int, once: float, layer_us: float) -> int:
    """Return how many steps hide `once`, in us, up to `MOST_REFRESH`; `refresh` if it is hidden."""
    tolerated = TOLERANCE * layer_us
    if once <= tolerated:
        return refresh
    return next((n for n in range(2, MOST_REFRESH) if once <= n * tolerated), MOST_REFRESH)


def _exposed_once(
    measured: SelectionTime,
    layer_us: float,
    timing: Timing,
    selection: SelectionSettings,
    *,
    has_own_gpu: bool,
    scanned: float,
) -> float:
    """Return what a selecting step adds to a layer on average, see `exposed_us`."""
    mean = scanned * measured.total_us + (1 - scanned) * measured.transfer_us
    if timing is Timing.NEXT_STEP or not has_own_gpu:
        # Every layer's may hide behind any; or nothing hides.
        return exposed_us(mean, layer_us, timing, selection, has_own_gpu=has_own_gpu)
    # Each that is scanned is waited for; rows of the others come behind it, and before they begin.
    return scanned * exposed_us(measured.total_us, layer_us, timing, selection, has_own_gpu=True)


def exposed_us(
    selection: float,
    layer: float,
    timing: Timing,
    settings: SelectionSettings,
    *,
    has_own_gpu: bool,
) -> float:
    """Return what of a `selection`, in us, a `layer` beside it does not hide, in a selecting step.

    With the layer's own query, or a look-ahead of no layer, the layer waits for all of it. A
    look-ahead of several layers hides no more than one of them: each layer brings a selection.
    """
    waits = timing is Timing.SAME_STEP_QUERY or (
        timing is Timing.SAME_STEP_HIDDEN and not settings.declared.layers_ahead
    )
    if not has_own_gpu or waits:
        return selection
    return max(0.0, selection - layer)
