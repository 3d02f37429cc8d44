# SPDX-License-Identifier: Apache-2.0
"""SGLang's FlashInfer backend in prefill passes, without FlashInfer and without a GPU.

The backend is SGLang's own code. What stands for FlashInfer's wrappers keeps the lists that it is
planned with, and attends to what they name, as FlashInfer does.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend as module
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

LAYERS, SLOTS, QUERY_HEADS, HEADS, DIM, WIDTH = 5, 96, 4, 2, 8, 40
_LISTS = "create_flashinfer_kv_indices_triton"
_TRANSLATOR: Any = None  # in later versions SGLang's own lists the slots
if not hasattr(module, _LISTS):
    _TRANSLATOR = importlib.import_module("sglang.srt.mem_cache.kv_index_translator")


class Pool:
    """SGLang's pool, as far as its backend and the staging use it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        shape = (2, LAYERS, SLOTS, HEADS, DIM)
        kv = torch.full(shape, float("nan")).to(dtype)
        if dtype.itemsize == 1:  # SGLang keeps FP8 as bytes
            kv = kv.view(torch.uint8)
        self.k_buffer, self.v_buffer = list(kv[0]), list(kv[1])
        self.num_reads = 0

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_reads += 1
        return self.k_buffer[layer].view(self.dtype), self.v_buffer[layer].view(self.dtype)

    def set_kv_buffer(self, layer: Any, location: Any, k: Any, v: Any, *_scales: Any) -> None:
        for buffers, new in ((self.k_buffer, k), (self.v_buffer, v)):
            buffers[layer.layer_id].view(self.dtype)[location.loc] = new.to(self.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[n, Hq, D]`` and log-sum-exp ``[n, Hq]``; over nothing they are 0 and -inf."""
    k, v = (x.float().repeat_interleave(QUERY_HEADS // HEADS, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->qhk", q, k)
    if causal:
        ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        logits = logits.masked_fill(ahead[:, None], float("-inf"))
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, v), torch.logsumexp(logits, -1)


class Paged:
    """FlashInfer's wrapper for K/V in a pool: pages of one token, not captured."""

    def begin_forward(
        self, qo_indptr: Any, kv_indptr: Any, indices: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        self._paged_kv_indices_buf = indices.to(indices.device, non_blocking=True)
        self._queries, self._keys = qo_indptr.tolist(), kv_indptr.tolist()
        assert len(indices) == self._keys[-1] + 256, "SGLang's list has a tail"

    def forward_return_lse(
        self, q: torch.Tensor, pool: Any, *, causal: bool, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for i in range(len(self._keys) - 1):
            slots = self._paged_kv_indices_buf[self._keys[i] : self._keys[i + 1]].long()
            part = q[self._queries[i] : self._queries[i + 1]]
            found.append(attend(part, pool[0][slots], pool[1][slots], causal=causal))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def forward(self, q: torch.Tensor, pool: Any, *, causal: bool, **_: Any) -> torch.Tensor:
        """As it is called without a ragged wrapper; over prefix and new tokens."""
        assert causal
        return self.forward_return_lse(q, pool, causal=False)[0]


class Ragged:
    """FlashInfer's wrapper for the new tokens."""

    def begin_forward(self, qo_indptr: torch.Tensor, *_: Any, **__: Any) -> None:
        self._bounds = qo_indptr.tolist()

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = torch.tensor(self._bounds).diff().tolist()
        parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        found = [attend(*part, causal=causal) for part in parts]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def forward(self, *given: torch.Tensor, causal: bool, **_: Any) -> torch.Tensor:
        return self.forward_return_lse(*given, causal=causal)[0]


def merge(a: Any, lse_a: Any, b: Any, lse_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    parts = ((a, lse_a), (b, lse_b))
    return sum(out * (own - lse).exp()[..., None] for out, own in parts), lse


class ListSlots:
    """SGLang's Triton kernel that lists the slots of a batch."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            table: Any, rows: Any, lengths: Any, indptr: Any, start: Any, out: Any, _: int,
            **options: Any,
        ) -> None:  # fmt: skip
            assert start is None
            assert options.get("ENTRY_PAGE_SIZE", 1) == 1
            for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
                first = int(indptr[i])
                out[first : first + length] = table[row, :length]

        return launch


_UNSTAGED: Any = SimpleNamespace(begin=lambda _prefixes: None, attended=lambda _layer: None)


class Serving:
    """SGLang's backend over a pool, with a request table of two rows that share no slots.

    `staging`, if it is set, is told of passes and layers as the backend of tandemkv does it.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.pool, self.staging = Pool(dtype), _UNSTAGED
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2)).int()
        self.table = torch.stack([order[:WIDTH], order[WIDTH : 2 * WIDTH]])
        self.full = self._backend()

    def _backend(self) -> Any:
        backend: Any = object.__new__(module.FlashInferAttnBackend)
        if _TRANSLATOR is not None:
            own = object.__new__(_TRANSLATOR.KVIndexTranslator)
            own.__dict__.update(req_to_token=self.table, _spaces={})  # not of the unified pool
            backend.kv_index_translator = own
        numbers = {"kv_indptr": torch.zeros(9, dtype=torch.int32)}
        numbers |= {"qo_indptr": torch.zeros(9, dtype=torch.int32)}
        backend.__dict__.update(
            token_to_kv_pool=self.pool, req_to_token_pool=None, use_sliding_window_kv_pool=False,
            is_multimodal=False, enable_mis=False, enable_deterministic=False, use_paged=False,
            prefill_uses_dequant_workspace=False, is_dllm_model=False, num_wrappers=1,
            prefill_split_tile_size=None, prefill_wrapper_ragged=Ragged(),
            prefill_wrappers_paged=[Paged()], dq_paged_kernel_lens=None,
            kv_cache_quant_method=SimpleNamespace(needs_global_scale=lambda: False),
            kv_last_page_len=torch.ones(9, dtype=torch.int32),
            **{name: [tensor] for name, tensor in numbers.items()},
        )  # fmt: skip
        updater: Any = object.__new__(module.FlashInferIndicesUpdaterPrefill)
        updater.__dict__.update(
            num_qo_heads=QUERY_HEADS, num_kv_heads=HEADS, head_dim=DIM, data_type=None,
            q_data_type=None, attn_backend=backend, req_to_token=self.table, _swa_kv_pool=None,
            kv_last_page_len=backend.kv_last_page_len, update=None,
            prefill_wrapper_ragged=backend.prefill_wrapper_ragged,
            **{name: [tensor] for name, tensor in numbers.items()},
        )  # fmt: skip
        updater.update = updater.update_single_wrapper
        backend.indices_updater_prefill = updater
        return backend

    def prefill(self, *chunks: tuple[int, int, int], fails_at: int = LAYERS) -> torch.Tensor:
        """Compute positions ``[start, end)`` of rows; returns all layers' outputs."""
        rows, starts, ends = (list(x) for x in zip(*chunks, strict=True))
        count = sum(ends) - sum(starts)
        locations = [self.table[row, start:end] for row, start, end in chunks]
        batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, req_pool_indices=torch.tensor(rows), spec_info=None,
            seq_lens=torch.tensor(ends), seq_lens_cpu=torch.tensor(ends), seq_lens_sum=sum(ends),
            extend_prefix_lens=torch.tensor(starts), extend_prefix_lens_cpu=starts,
            out_cache_loc=torch.cat(locations).long(), encoder_lens=None,
            cross_attention_custom_mask=None, kv_loc_plan=None, out_cache_loc_is_physical=True,
        )  # fmt: skip
        self.full.init_forward_metadata(batch)
        self.staging.begin(starts)
        found = []
        for index in range(LAYERS):
            if index == fails_at:
                raise RuntimeError("the pass fails")
            layer = SimpleNamespace(
                layer_id=index, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS,
                tp_v_head_num=HEADS, head_dim=DIM, logit_cap=0.0, scaling=1.0,
                sliding_window_size=-1, is_cross_attention=False,
                attn_type=AttentionType.DECODER, k_scale=None, v_scale=None, k_scale_float=None,
                v_scale_float=None,
            )  # fmt: skip
            generator = torch.Generator().manual_seed(1000 * index + 7 * sum(ends) + len(ends))
            q = torch.randn(count, QUERY_HEADS, DIM, generator=generator)
            k, v = torch.randn(2, count, HEADS, DIM, generator=generator)
            found.append(self.full.forward_extend(q, k, v, layer, batch))
            self.staging.attended(index)
        return torch.stack(found)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put what stands for FlashInfer into SGLang's module."""
    patch.setattr(_TRANSLATOR or module, _LISTS, ListSlots())
    patch.setattr(module, "_safe_merge_state", merge, raising=False)
