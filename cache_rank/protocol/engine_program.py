# SPDX-License-Identifier: Apache-2.0
"""What an engine does in each layer of a step: derived, never sent.

The forward pass and the engine may be in two processes. Both make this object from the model, the
settings and what the policy declares, so that what one side raises flags for is what the other
waits for.
"""

from __future__ import annotations

from enum import StrEnum

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings, SelectionSettings

from .errors import SettingsError
from .messages import PolicyTraits, Timing

OWN_SELECTIONS = PolicyTraits()
"""Every layer has a selection of its own, and no step is slow."""


class DecodeKind(StrEnum):
    """What a decode step does beside the forward pass; also the label of its CUDA graph."""

    DENSE = "tandemkv-dense"
    INDEXING = "tandemkv-indexing"
    SELECTING = "tandemkv-selecting"
    """Indexes, too."""


def check_other_layers(model: ModelSpec, placement: Placement) -> None:
    """Refuse a model whose other layers the cache rank of `placement` is in the way of.

    Raises `SettingsError`, with what to pass.
    """
    if model.linear_layers and placement.maps_memory:
        raise SettingsError(
            f"{model.architecture} has layers of linear attention. If a cache rank in a process of "
            "its own is lost, its passes are done again, and the recurrent state from before them "
            f"has been overwritten; so transport={placement.link} is refused; use --cache-ranks 0"
        )
    if model.windowed_layers and placement.has_far_pool:
        raise SettingsError(
            f"{model.architecture} has layers with a sliding window, which attend where the model "
            f"is, and with transport={placement.link} on two GPUs K/V lie on the other one; use "
            "--cache-ranks 0"
        )


class EngineProgram:
    """Which layers select, for whom and when.

    What the policy declares is in `settings`; `traits` are those that it has with this model. Slots
    are given to requests in pages of `page_size`.

    Attributes
    ----------
    refresh_every : int
        Steps from one that selects to the next.
    late_layers : tuple of int
        Layers that are selected for at the end of a step, for the next one. They are no
        `targets_of` any layer; all have attended where the last layer that has targets begins.
    attends : bool
        Whether the policy attends in every sparse layer (`Engine.attend_selected`), and
        selects nothing.
    is_far : bool
        Whether K/V lie on another GPU or host than the model: exact layers, and requests whose step
        is slow, attend there (`attends_remotely`).
    tells_all : bool
        Whether every step is announced: K/V are on another host, and those of each step go there.
    slow_steps : RefreshRule
        Which steps of a sparse request are slow: it attends to everything, without samples, and is
        selected for, for the next step on. Nothing is selected for others.
    index_interval : int
        Tokens between two that the key index takes in, at lengths it divides (0: none); 1 if
        queries are kept. A request of another length may be left out.
    is_captured : bool
        Whether a GPU captures decode steps; else each is queued anew, and may wait for the device.

    Raises
    ------
    SettingsError
        If a late layer has not attended where the last layer with targets begins, or
        `check_other_layers` refuses.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: RankSettings,
        traits: PolicyTraits = OWN_SELECTIONS,
        *,
        page_size: int,
    ) -> None:
        selection, declared = settings.selection, settings.selection.declared
        self.num_layers, self._num_kv_heads = model.num_layers, model.num_kv_heads
        check_other_layers(model, settings.placement)
        # To the engine a layer with a window, or a state, is one that SGLang attends in.
        self._exact_layers = frozenset((*selection.exact_layer_ids, *model.other_layers))
        self._traits = traits
        self._ahead = declared.layers_ahead
        self.timing, self.all_exact = declared.timing, declared.all_exact
        self.keeps_queries, self.attends = declared.wants_query_window, declared.attends
        self.is_far = settings.placement.has_far_pool
        # Host memory is read by the model's GPU faster than by a CPU that attends to all of it.
        self._is_remote = self.is_far and not settings.placement.host_engine
        self.tells_all = settings.placement.has_far_host
        self.slow_steps, self.is_captured = declared.refresh, declared.is_captured
        # A policy that attends selects nothing for the inference rank to attend to.
        layers = range(0 if declared.keeps_sink_only else model.num_layers)
        self.selecting = [x for x in layers if x not in self._exact_layers]
        # Layers whose keys are scanned; the others follow one of them, if selections are shared. An
        # exact layer (Kascade's layer 0) may select for others.
        used = {self.source_of(x) for x in self.selecting}
        self.sources = [x for x in layers if x in used and self.source_of(x) == x]
        self._book_of = {layer: book for book, layer in enumerate(self.selecting)}
        self._is_source, self._is_selecting = frozenset(self.sources), frozenset(self.selecting)
        exact = frozenset(range(model.num_layers)) if self.all_exact else self._exact_layers
        self._sparse = frozenset(range(model.num_layers)) - exact
        self.index_interval = _index_interval(selection, page_size)
        self.refresh_every = selection.refresh_steps
        count = selection.num_late
        most = selection.most_late(model.num_layers, model.other_layers)
        if count > most:
            raise SettingsError(
                f"late_layers={count}: too many for {model.num_layers} layers; use at most {most}"
            )
        self.late_layers = tuple(x for x in self.sources if x < count)
        self.last_entry = max((x for x in layers if self.targets_of(x)), default=-1)

    @property
    def selects(self) -> bool:
        """Whether anything is selected in decode."""
        return bool(self.selecting)

    @property
    def needs_hidden(self) -> bool:
        """Whether queries are predicted from the residual stream."""
        return self.timing is Timing.SAME_STEP_HIDDEN

    @property
    def needs_query(self) -> bool:
        """Whether the policy selects with the layer's own query."""
        return self.timing is Timing.SAME_STEP_QUERY or self.selects_for_next_step

    @property
    def selects_for_next_step(self) -> bool:
        """Whether what is selected is used one step later."""
        return self.timing in (Timing.NEXT_STEP, Timing.EXACT_STEP)

    @property
    def scanned_share(self) -> float:
        """Layers whose keys are scanned, of those that are selected for; at most 1."""
        return min(1.0, len(self.sources) / max(1, len(self.selecting)))

    def is_sparse_layer(self, layer: int) -> bool:
        """Whether `layer` attends to a resident set."""
        return layer in self._sparse

    def is_source(self, layer: int) -> bool:
        """Whether the keys of `layer` are scanned, for itself or for layers that follow it."""
        return layer in self._is_source

    def source_of(self, layer: int) -> int:
        """Return the layer whose selection `layer` uses, itself if none is shared."""
        return self._traits.layer_sources[layer] if self._traits.layer_sources else layer

    def book_of(self, layer: int) -> int | None:
        """Return the place of `layer` among the layers that are selected for; None if it is not."""
        return self._book_of.get(layer)

    def followers_of(self, layer: int) -> tuple[int, ...]:
        """Later layers that use what is chosen for `layer`; empty unless selections are shared."""
        if not self.is_source(layer):
            return ()
        return tuple(x for x in self.selecting if x > layer and self.source_of(x) == layer)

    def slow_heads(self, layer: int) -> tuple[int, ...]:
        """Return the KV heads that a selection of a slow step in `layer` is made with."""
        if not self._traits.slow_heads or layer in self._exact_layers:
            return tuple(range(self._num_kv_heads))
        return self._traits.slow_heads[layer]

    def fetched_by(self, layer: int) -> tuple[int, ...]:
        """Layers that rows are brought to when `layer` has been chosen for, in order."""
        own = (layer,) if layer in self.selecting else ()
        return own + self.followers_of(layer)

    def targets_of(self, layer: int) -> tuple[int, ...]:
        """Layers whose query is predicted from the residual stream at the entry of `layer`.

        Layer 0 serves the first ``layers_ahead + 1`` layers; nothing earlier exists.
        """
        first = layer + self._ahead if layer else 0
        found = range(first, min(layer + self._ahead + 1, self.num_layers))
        return tuple(x for x in found if x in self._is_source and x not in self.late_layers)

    def reads_stream(self, layer: int) -> bool:
        """Whether the residual stream at the entry of `layer` is wanted in a selecting step."""
        return self.needs_hidden and (bool(self.targets_of(layer)) or layer in self.late_layers)

    def indexes(self, kind: DecodeKind, layer: int) -> bool:
        """Whether a decode step of a kind takes the newest key of `layer` into the index."""
        is_due = kind is not DecodeKind.DENSE and self.index_interval > 0
        return is_due and self.is_source(layer)

    def awaits(self, kind: DecodeKind, layer: int) -> bool:
        """Whether the attention of `layer` waits for what the same step selects."""
        is_in_step = kind is DecodeKind.SELECTING and not self.selects_for_next_step
        return is_in_step and layer in self._is_selecting and layer not in self.late_layers

    def tells_of_next(self, kind: DecodeKind, layer: int) -> bool:
        """Whether the engine tells when `layer` has what a decode step selects for the next one.

        To another host it goes at once, beside the layers that are still to come. Not where the
        flag tells of an output.
        """
        is_for_next = kind is DecodeKind.SELECTING and not self.awaits(kind, layer)
        is_told = self.tells_all and is_for_next and layer in self._is_selecting
        return is_told and not self.attends_remotely(kind, layer)

    def hands_over_query(self, kind: DecodeKind, layer: int) -> bool:
        """Whether the query of `layer` is handed over before it attends, to select with it."""
        is_in_step = kind is DecodeKind.SELECTING and not self.selects_for_next_step
        return is_in_step and self.needs_query and self.is_source(layer)

    def selects_later(self, kind: DecodeKind) -> bool:
        """Whether a decode step of a kind selects for the next one, with queries of its own."""
        return kind is DecodeKind.SELECTING and self.selects_for_next_step

    def hands_over_later(self, kind: DecodeKind, layer: int) -> bool:
        """Whether the engine is told that `layer` has attended, and with which query.

        See `selects_later`; else the query is observed.
        """
        if not self.is_sparse_layer(layer):
            return False
        keeps = self.keeps_queries and self.indexes(kind, layer)
        keeps = keeps and not self.hands_over_query(kind, layer)  # which is observed then
        return keeps or self.selects_later(kind)

    def attends_remotely(self, kind: DecodeKind, layer: int) -> bool:
        """Whether `layer` attends to all tokens where its K/V are, on another GPU or host.

        All requests of a decode step of a kind do in an exact layer, in others those whose step is
        slow. Host memory beside the model's GPU is read by that GPU itself.
        """
        has_slow = bool(self.slow_steps) and kind is DecodeKind.SELECTING
        return self._is_remote and (has_slow or not self.is_sparse_layer(layer))

    def asks(self, kind: DecodeKind) -> bool:
        """Whether a decode step of a kind has any work for the engine."""
        is_exact = self._is_remote and len(self._sparse) < self.num_layers
        return kind is not DecodeKind.DENSE or self.attends or is_exact or self.tells_all

    def attends_in(self, layer: int) -> bool:
        """Whether the policy attends in `layer`, and its output is merged."""
        return self.attends and self.is_sparse_layer(layer)

    def extends(self, layer: int, *, seeds: bool) -> bool:
        """Whether a prefill step has something to do for `layer`, if prompts end in it or not."""
        indexes = self.index_interval > 0 and self.is_source(layer)
        return indexes or (seeds and self.is_sparse_layer(layer))


def _index_interval(selection: SelectionSettings, page_size: int) -> int:
    """Return what divides the lengths at which a step has something for the index; 0: none.

    Of a policy's index, in pages of `page_size`; the precision concerns keys.
    """
    declared = selection.declared
    if declared.wants_query_window:
        return 1
    if declared.keeps_sink_only:
        return 0
    if declared.index == "page_bounds":
        return 1
    return {"native": 0, "int8": 1, "int4": page_size}[selection.index_dtype]
