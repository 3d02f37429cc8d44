# SPDX-License-Identifier: Apache-2.0
"""Which transfers a step makes, in which order and of which size.

Both ranks derive the same list from the same `StepBegin`, settings and capabilities, so
every size is agreed before either side posts a transfer (a gloo receiver dies on a size
mismatch). The list is in the order in which the cache rank handles it; the order per
direction is what the data plane keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from .errors import ProtocolError
from .messages import PolicyTraits, RowFlag, RowStep, StepBegin, StepKind, Timing
from .model_spec import ModelSpec
from .pack_layout import PackLayout
from .settings import RankSettings

OWN_SELECTIONS = PolicyTraits()
"""Every layer has a selection of its own, and no step is slow."""


class Direction(Enum):
    """Who sends."""

    UP = "inference rank to cache rank"
    DOWN = "cache rank to inference rank"


class TransferKind(Enum):
    """What a transfer carries. Shapes: B requests of the step, S sparse ones, X exact ones."""

    SLOT_TABLE = "slot_table"
    """UP ``[num_table_slots]`` int32."""
    RESTORE = "restore"
    """DOWN ``[2, num_prefix_tokens, H, D]``: K and V of one layer's prefixes, requests in order."""
    CHUNK_KV = "chunk_kv"
    """UP ``[2, num_chunk_tokens, H, D]``: K and V of one layer's new tokens."""
    SEED_QUERY = "seed_query"
    """UP ``[sum(window), Hq, D]``: the last prompt queries of the rows that are seeded."""
    SEED = "seed"
    """DOWN ``[num_seeded, H, R]`` int32: positions for the resident slots, in slot order."""
    HIDDEN = "hidden"
    """UP ``[S, hidden]``: residual stream at the entry of `layer`."""
    QUERY = "query"
    """UP ``[S, Hq, D]``: true queries, for a same-step selection (oracle, kascade's anchors)."""
    PACK = "pack"
    """DOWN ``[nbytes]`` uint8, `PackLayout` of `layers`, used in this step."""
    EXACT_QUERY = "exact_query"
    """UP ``[X, Hq, D]``: true queries of the exact step; of slow heads only, where declared."""
    EXACT_OUTPUT = "exact_output"
    """DOWN ``[X, Hq, D + 1]`` float32: output and, last, its natural log-sum-exp."""
    STEP_KV = "step_kv"
    """UP ``[len(layers), B, 2H (+ Hq), D]``: K, V (and Q for next-step policies)."""
    DELTA = "delta"
    """DOWN ``[nbytes]`` uint8, `PackLayout` of the selecting layers, used in the next step.

    Its rows are those of `StepProgram.packed_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer. `layers` are those that it is about; `dtype` is a torch dtype name."""

    kind: TransferKind
    direction: Direction
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Elements in the message."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Derives the transfers of a step."""

    model: ModelSpec
    settings: RankSettings
    timing: Timing
    traits: PolicyTraits = OWN_SELECTIONS

    def is_selecting_layer(self, layer: int) -> bool:
        """Whether the policy selects for `layer` (exact layers never do)."""
        exact = self.settings.selection.exact_layer_ids
        return self.timing is not Timing.NONE and layer not in exact

    @property
    def attends(self) -> bool:
        """Whether sparse rows are completed on the cache rank in every layer, by the policy."""
        return self.timing is Timing.SAME_STEP_ATTENTION

    def source_of(self, layer: int) -> int:
        """Return the layer whose selection `layer` uses, `layer` itself if none is shared."""
        return self.traits.layer_sources[layer] if self.traits.layer_sources else layer

    def followers(self, layer: int) -> list[tuple[int, ...]]:
        """Return the other selecting layers that use the selection of `layer`, pack by pack."""
        layers = range(layer + 1, self.model.num_layers)
        found = [t for t in layers if self.is_selecting_layer(t) and self.source_of(t) == layer]
        size = self.settings.exchange.layers_per_pack
        return [tuple(found[i : i + size]) for i in range(0, len(found), size)]

    def selections(self, layer: int) -> list[tuple[int, ...]]:
        """Return the layers of each pack that a same-step selection in `layer` makes, in order.

        The first holds `layer` alone, for it is waited for; none if `layer` uses another's.
        An exact layer (Kascade's layer 0) may select for others.
        """
        if self.timing is Timing.NONE or self.source_of(layer) != layer:
            return []
        own = [(layer,)] if self.is_selecting_layer(layer) else []
        return own + self.followers(layer)

    def slow_heads(self, layer: int) -> tuple[int, ...]:
        """Return the KV heads that a slow row completes on the cache rank in `layer`."""
        heads = range(self.model.num_kv_heads)
        if not self.traits.slow_heads or layer in self.settings.selection.exact_layer_ids:
            return tuple(heads)
        return self.traits.slow_heads[layer]

    def packed_rows(self, rows: Sequence[RowStep]) -> list[RowStep]:
        """Return the requests that the packs of a decode step are about.

        With `Timing.EXACT_STEP` the slow ones: in between nothing changes. Without
        `dense_while_fits` all sparse ones, because empty slots have to be filled each step.
        """
        sparse = sparse_rows(rows)
        if self.timing is not Timing.EXACT_STEP or not self.settings.selection.dense_while_fits:
            return sparse
        return [r for r in sparse if r.flags & RowFlag.SLOW]

    def packs(self) -> list[tuple[int, ...]]:
        """Return the layers of each layer pack."""
        size, count = self.settings.exchange.layers_per_pack, self.model.num_layers
        return [tuple(range(i, min(i + size, count))) for i in range(0, count, size)]

    def targets_of(self, layer: int) -> tuple[int, ...]:
        """Layers whose query is predicted from the residual stream at the entry of `layer`.

        Layer 0 serves the first ``layers_ahead + 1`` layers; nothing earlier exists.
        """
        ahead = self.settings.selection.declared.layers_ahead
        candidates = range(ahead + 1) if layer == 0 else range(layer + ahead, layer + ahead + 1)
        return tuple(
            t
            for t in candidates
            if t < self.model.num_layers and self.is_selecting_layer(t) and self.source_of(t) == t
        )

    def pack_layout(self, num_layers: int, num_rows: int) -> PackLayout:
        """Layout of a pack or delta for `num_layers` layers and `num_rows` sparse requests."""
        return PackLayout(
            num_layers=num_layers,
            num_rows=num_rows,
            num_kv_heads=self.model.num_kv_heads,
            fetch_cap=self.settings.selection.fetch_cap_tokens,
            head_dim=self.model.head_dim,
            dtype=self.model.dtype,
            num_samples=self.settings.selection.num_samples,
        )

    def transfers(self, step: StepBegin) -> list[Transfer]:
        """Return every transfer of `step`, in the cache rank's order.

        Raises
        ------
        ProtocolError
            If the sizes in `step` contradict each other or the settings.
        """
        self._check(step)
        table = Transfer(
            kind=TransferKind.SLOT_TABLE,
            direction=Direction.UP,
            layers=(),
            shape=(step.num_table_slots,),
            dtype="int32",
        )
        body = self._extend(step) if step.kind == StepKind.EXTEND else self._decode(step)
        return [t for t in (table, *body) if t.num_elements]

    def selects_at(self, step_id: int) -> bool:
        """Whether a selection is made in step `step_id`; with `Timing.EXACT_STEP` rows decide."""
        if self.timing in (Timing.NONE, Timing.EXACT_STEP):
            return self.timing is Timing.EXACT_STEP
        return step_id % self.settings.selection.refresh_steps == 0

    def _check(self, step: StepBegin) -> None:
        limit = self.settings.selection.seed_window
        for r in step.rows:
            window = limit if r.flags & RowFlag.SEED else 0
            if r.prefix_len > r.length or r.window > min(window, r.length):
                raise ProtocolError(
                    f"step_id={step.step_id} row={r.row}: prefix_len={r.prefix_len} and "
                    f"window={r.window} do not fit length={r.length}, flags={r.flags}, "
                    f"seed_window={limit}"
                )
        is_extend = step.kind == StepKind.EXTEND
        slots = sum(r.length for r in step.dirty)
        slots += sum(r.length for r in step.rows) if is_extend else len(step.rows)
        if step.num_table_slots != slots:
            raise ProtocolError(
                f"step_id={step.step_id}: num_table_slots={step.num_table_slots}, "
                f"its rows and dirty rows make {slots}"
            )

    def _extend(self, step: StepBegin) -> list[Transfer]:
        model, out = self.model, []
        heads, dim = model.num_kv_heads, model.head_dim
        prefix = sum(r.prefix_len for r in step.rows)
        chunk = sum(r.length - r.prefix_len for r in step.rows)
        seeded = seeded_rows(step.rows)

        def restore(layer: int) -> None:
            if layer < model.num_layers:
                shape = (2, prefix, heads, dim)
                out.append(self._transfer(TransferKind.RESTORE, Direction.DOWN, layer, shape))

        restore(0)
        restore(1)
        for layer in range(model.num_layers):
            shape = (2, chunk, heads, dim)
            out.append(self._transfer(TransferKind.CHUNK_KV, Direction.UP, layer, shape))
            if seeded and self.is_selecting_layer(layer):
                queries = (sum(r.window for r in seeded), model.num_qo_heads, dim)
                out.append(self._transfer(TransferKind.SEED_QUERY, Direction.UP, layer, queries))
                positions = (len(seeded), heads, self.settings.selection.num_resident)
                out.append(
                    self._transfer(TransferKind.SEED, Direction.DOWN, layer, positions, "int32")
                )
            restore(layer + 2)
        return out

    def _decode(self, step: StepBegin) -> list[Transfer]:
        model, out = self.model, []
        selection = self.settings.selection
        sparse, dim = len(self.packed_rows(step.rows)), model.head_dim
        selects = bool(sparse) and self.selects_at(step.step_id)
        pack_of_last = {layers[-1]: layers for layers in self.packs()}
        for layer in range(model.num_layers):
            if selects and self.timing is Timing.SAME_STEP_HIDDEN and self.targets_of(layer):
                hidden = (sparse, model.hidden_size)
                out.append(self._transfer(TransferKind.HIDDEN, Direction.UP, layer, hidden))
                for target in self.targets_of(layer):
                    out.extend(self._packs(self.selections(target), sparse))
            by_query = selects and self.timing is Timing.SAME_STEP_QUERY
            made = self._packs(self.selections(layer), sparse) if by_query else []
            if made and self.is_selecting_layer(layer):
                queries = (sparse, model.num_qo_heads, dim)
                out.append(self._transfer(TransferKind.QUERY, Direction.UP, layer, queries))
                out.extend(made)
            is_completed = self.attends or layer in selection.exact_layer_ids
            exact = len(exact_rows(step.rows, is_completed))
            if exact:
                heads = len(self.slow_heads(layer)) * model.gqa_group_size
                queries = (exact, heads, dim)
                out.append(self._transfer(TransferKind.EXACT_QUERY, Direction.UP, layer, queries))
                merged = (exact, heads, dim + 1)
                out.append(
                    self._transfer(
                        TransferKind.EXACT_OUTPUT, Direction.DOWN, layer, merged, "float32"
                    )
                )
            if made and not self.is_selecting_layer(layer):
                out.extend(made)  # selected with the exact layer's query
            if layer in pack_of_last:
                layers = pack_of_last[layer]
                width = 2 * model.num_kv_heads
                if self.timing is Timing.NEXT_STEP:
                    width += model.num_qo_heads
                shape = (len(layers), len(step.rows), width, dim)
                out.append(self._transfer(TransferKind.STEP_KV, Direction.UP, layers, shape))
                chosen = tuple(t for t in layers if self.is_selecting_layer(t))
                is_later = self.timing in (Timing.NEXT_STEP, Timing.EXACT_STEP)
                if selects and is_later and chosen:
                    out.append(self._pack(TransferKind.DELTA, chosen, sparse))
        return out

    def _transfer(
        self,
        kind: TransferKind,
        direction: Direction,
        layers: int | tuple[int, ...],
        shape: tuple[int, ...],
        dtype: str | None = None,
    ) -> Transfer:
        return Transfer(
            kind=kind,
            direction=direction,
            layers=(layers,) if isinstance(layers, int) else layers,
            shape=shape,
            dtype=dtype or self.model.dtype,
        )

    def _packs(self, packs: Sequence[tuple[int, ...]], num_rows: int) -> list[Transfer]:
        return [self._pack(TransferKind.PACK, layers, num_rows) for layers in packs]

    def _pack(self, kind: TransferKind, layers: tuple[int, ...], num_rows: int) -> Transfer:
        nbytes = self.pack_layout(len(layers), num_rows).nbytes
        return self._transfer(kind, Direction.DOWN, layers, (nbytes,), "uint8")


def sparse_rows(rows: Sequence[RowStep]) -> list[RowStep]:
    """Return the requests of a decode step that the policy selects for."""
    return [r for r in rows if r.flags & RowFlag.SPARSE and not r.flags & RowFlag.EXACT]


def exact_rows(rows: Sequence[RowStep], layer_is_exact: bool) -> list[RowStep]:
    """Return the requests whose attention in a layer is completed by the cache rank."""
    wanted = RowFlag.EXACT | RowFlag.SLOW | (RowFlag.SPARSE if layer_is_exact else 0)
    return [r for r in rows if r.flags & wanted]


def seeded_rows(rows: Sequence[RowStep]) -> list[RowStep]:
    """Return the requests of an extend whose resident set is to be filled by the policy."""
    return [r for r in rows if r.flags & RowFlag.SEED and r.flags & RowFlag.SPARSE]
