# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a list of slots: resident rows first, then the latest tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.pool import store_tokens
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.merge import merge_attention
from tandemkv.kernels.step_tables import load_attended, load_ring

from .graph_variants import PlansApart
from .samples import LOG2_UNIT, StepSamples


class AttendTable:
    """Which slots each request of a decode step attends to.

    ``slots [max_batch, width]`` int32, of which the first ``attended [max_batch]`` int64 count: all
    tokens of a request of up to `num_dense`, else ``min(length, R + num_recent)``. The width is the
    largest of both and `longest`, the longest request that `attend_whole` is asked for. `whole` is
    what that was given for the step that was loaded last, or None.
    """

    def __init__(
        self,
        *,
        num_resident: int,
        num_recent: int,
        num_dense: int,
        max_batch: int,
        device: torch.device,
        first_slot: int = 0,
        longest: int = 0,
    ) -> None:
        self._most = num_resident + num_recent
        self.width = max(self._most, num_dense, longest)
        self._num_resident, self._num_recent = num_resident, num_recent
        self.num_dense, self._first_slot = num_dense, first_slot
        self.whole: torch.Tensor | None = None
        self.slots = torch.zeros((max_batch, self.width), dtype=torch.int32, device=device)
        self.attended = torch.ones(max_batch, dtype=torch.int64, device=device)

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """Fill in the requests of a step; ``rows, lengths [B]`` on the device.

        A sparse request has ``min(R, length - num_recent)`` resident slots; token positions
        count from the end in both kinds, for a dense one has all of them. `num_dense` is this
        step's, at most that of the table.
        """
        self.num_dense, self.whole = num_dense, None
        load_attended(
            rows, lengths, req_to_token, self.slots, self.attended,
            num_resident=self._num_resident, num_recent=self._num_recent,
            num_dense=num_dense, first_slot=self._first_slot,
        )  # fmt: skip

    def attend_whole(
        self, whole: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> None:  # fmt: skip
        """Let requests of the step that was loaded last attend to all their tokens.

        ``whole [B]`` bool, on a CPU; the others as for `load`.
        """
        self.whole = whole
        for place in whole.nonzero()[:, 0].tolist():
            row, length = int(rows[place]), int(lengths[place])
            self.slots[place, :length] = req_to_token[row, :length]
            self.attended[place] = length

    def attended_on_host(
        self, lengths: torch.Tensor, num_dense: int, whole: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`attended` for lengths ``[B]`` that are known on the host."""
        is_sparse = lengths > num_dense
        if whole is not None:
            is_sparse &= ~whole
        return torch.where(is_sparse, lengths.clamp(max=self._most), lengths)


class RingTable(AttendTable):
    """The same for resident sets that are tensors of their own, ``[rows, R + ring, H, D]``.

    ``rows, write_slots [max_batch]`` int64 are the row of each request, and slot of its newest
    token.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rows = torch.zeros_like(self.attended)
        self.write_slots = torch.zeros_like(self.attended)

    def load(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor, num_dense: int
    ) -> None:
        """See `AttendTable.load`; `req_to_token` is not needed."""
        self.num_dense, self.whole = num_dense, None
        load_ring(
            rows, lengths, self.slots, self.attended, self.rows, self.write_slots,
            num_resident=self._num_resident, num_recent=self._num_recent,
            num_dense=num_dense,
        )  # fmt: skip


class PagedResident:
    """Attends to what an `AttendTable` lists, without FlashInfer, for devices that have none."""

    def __init__(self, table: AttendTable, pool: Any, samples: StepSamples | None = None) -> None:
        self._pool, self._table, self._samples = pool, table, samples

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""

    def plan(
        self, forward_batch: Any, *, in_capture: bool, in_graph: bool, kind: DecodeKind
    ) -> None:
        """Prepare a decode step of a kind; the table is loaded."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool, *, with_samples: bool, rest: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write k, v at the step's slots, and return ``[B, Hq * D]``.

        Samples, if there are any, are left out unless `with_samples`. `rest`
        ``[B, Hq, D + 1]`` float32 is output and natural log-sum-exp over tokens that are attended
        to elsewhere. `sinks` ``[Hq]`` are those of a model that has them.
        """
        if save_kv_cache:
            store_tokens(self._pool, layer, forward_batch, k, v)
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        size, samples = len(query), self._samples if with_samples else None
        if samples is not None:
            samples.begin(layer.layer_id, query, scale=layer.scaling)
        out, lse = attend_paged(
            query, keys, values, self._table.slots[:size], self._table.attended[:size],
            scale=layer.scaling,
        )  # fmt: skip
        return _merged(out, lse, query, layer, samples, rest, sinks).to(q.dtype)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, layer: Any,
    samples: StepSamples | None, rest: torch.Tensor | None, sinks: torch.Tensor | None,
    lse_unit: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Return ``[B, Hq * D]``: `out` and what is not in it; see `PagedResident.attend`.

    Attention to `samples` has begun.
    """
    if sinks is not None:
        out, lse = join_sinks(out, lse, sinks, lse_unit=lse_unit)
    if samples is not None:
        samples.attend(layer.layer_id, query, out, lse, scale=layer.scaling, lse_unit=lse_unit)
    if rest is not None:
        rest = rest.clone()  # beside a GPU it is host memory, and read more than once
        out, _ = merge_attention(out, lse * lse_unit, rest[..., :-1], rest[..., -1])
    return out.reshape(len(query), -1)


class _StepView(SimpleNamespace):
    """A forward batch as far as planning goes; unlike its parent it can be referred to weakly."""


class FlashInferResident(PagedResident):
    """FlashInfer's paged decode through SGLang's own backend, which gets our table.

    SGLang plans FlashInfer's work from lengths on the host and copies slots from its request
    table; both are replaced by those of the table, so that CUDA graphs and fast planning stay
    SGLang's.
    """

    def __init__(
        self, runner: Any, table: AttendTable, pool: Any, samples: StepSamples | None = None
    ) -> None:
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        super().__init__(table, pool, samples)
        max_batch = len(table.slots)
        self._backend = FlashInferAttnBackend(
            # In a model with sliding windows it would have a second set of wrappers.
            sglang_versions.With(runner, sliding_window_size=None),
            skip_prefill=True,
            kv_indptr_buf=torch.zeros(max_batch + 1, dtype=torch.int32, device=table.slots.device),
            kv_last_page_len_buf=torch.ones(
                max_batch, dtype=torch.int32, device=table.slots.device
            ),
            init_new_workspace=True,
        )
        sglang_versions.read_slots_from(self._backend, table.slots)
        self._backend.token_to_kv_pool = pool
        self._plans = PlansApart(self._backend)
        self._batch_index = torch.arange(max_batch, device=table.slots.device)
        if sglang_versions.proves_slots():
            self._prove_slots()

    def _prove_slots(self) -> None:
        """Plan a step over known slots, and see that FlashInfer was given them.

        Raises `ContractError` if it attends to other slots: nothing else would show it.
        """
        table = self._table
        size, width = min(2, len(table.slots)), min(3, table.width)
        table.slots[:size, :width] = torch.arange(
            1, size * width + 1, device=table.slots.device
        ).view(size, width)
        lengths = torch.full((size,), width)
        self._backend.init_forward_metadata(self._view(lengths, lengths.to(table.slots.device)))
        wrapper = self._backend.forward_metadata.decode_wrappers[0]
        given = wrapper._paged_kv_indices_buf[: size * width].tolist()
        if given != table.slots[:size, :width].flatten().tolist():
            raise ContractError(
                f"SGLang {sglang_versions.installed()} gave FlashInfer the slots {given} for a "
                f"table of 1 to {size * width}: install sglang=={sglang_versions.OLDEST}"
            )
        table.slots[:size, :width] = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See `PagedResident.init_cuda_graph_state`."""
        table = self._table
        self._backend.init_cuda_graph_state(
            max_bs,
            max_num_tokens,
            kv_indices_buf=torch.zeros(
                max_bs * table.width, dtype=torch.int32, device=table.slots.device
            ),
        )

    def plan(
        self, forward_batch: Any, *, in_capture: bool, in_graph: bool, kind: DecodeKind
    ) -> None:
        """See `PagedResident.plan`."""
        table, size = self._table, forward_batch.batch_size
        lengths = forward_batch.seq_lens_cpu[:size]
        on_host = table.attended_on_host(lengths, table.num_dense, table.whole)
        view = self._view(on_host, table.attended[:size])
        view.forward_mode = forward_batch.forward_mode
        view.out_cache_loc, view.positions = forward_batch.out_cache_loc, forward_batch.positions
        if in_graph:
            self._plans.use(kind)
            self._backend.init_forward_metadata_out_graph(view, in_capture=in_capture)
        else:
            self._backend.init_forward_metadata(view)

    def _view(self, on_host: torch.Tensor, attended: torch.Tensor) -> _StepView:
        """Return what SGLang plans a decode step from; row i of the table is request i."""
        size = len(on_host)
        return _StepView(
            batch_size=size,
            req_pool_indices=self._batch_index[:size],
            seq_lens=attended,
            seq_lens_cpu=on_host,
            seq_lens_sum=int(on_host.sum()),
            encoder_lens=None,
            spec_info=None,
            kv_loc_plan=None,  # asked for from 0.5.22 on, and used by the unified pool alone
            forward_mode=ForwardMode.DECODE,
            out_cache_loc=None,
            positions=None,
        )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool, *, with_samples: bool, rest: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `PagedResident.attend`."""
        samples = self._samples if with_samples else None
        if samples is None and sinks is None and rest is None:
            found: torch.Tensor = self._backend.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache
            )
            return found
        # As SGLang does it, but for the log-sum-exp.
        backend, query = self._backend, q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        if save_kv_cache:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            scales = backend._kv_write_scales(layer)
            self._pool.set_kv_buffer(layer, location, k, v, *scales)
        wrapper = backend.forward_metadata.decode_wrappers[backend._get_wrapper_idx(layer)]
        if samples is not None:
            samples.begin(layer.layer_id, query, scale=layer.scaling)
        out, lse = wrapper.forward_return_lse(
            query, self._pool.get_kv_buffer(layer.layer_id), sm_scale=layer.scaling,
            logits_soft_cap=layer.logit_cap, k_scale=layer.k_scale_float,
            v_scale=layer.v_scale_float,
        )  # fmt: skip
        return _merged(out, lse, query, layer, samples, rest, sinks, LOG2_UNIT)


def join_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, *, lse_unit: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over tokens and sinks, contiguous, and its log-sum-exp.

    A sink is a learned logit per query head that takes a share of its softmax, as a token without a
    value. Whatever is merged afterwards is merged as if the sink had been attended to.

    Over the tokens alone they are `out` ``[B, Hq, D]``, float, and `lse` ``[B, Hq]``, float32; the
    results are of their dtypes. `lse` times `lse_unit` is a natural logarithm: ``ln 2`` for
    FlashInfer's. `sinks` ``[Hq]``, float, are the logits of each head, natural and not scaled.
    """
    natural = lse.float() * lse_unit
    joined = torch.logaddexp(natural, sinks.float().expand_as(natural))
    share = torch.sigmoid(natural - sinks.float())[..., None]
    return (out.float() * share).to(out.dtype), joined / lse_unit
