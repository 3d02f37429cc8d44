# SPDX-License-Identifier: Apache-2.0
"""The operations of a profile on a device, with the kernels that serve there.

Kernels are timed as replays of a captured graph, copies by CUDA events. On a CPU the reference
implementations run: that is for tests, no profile is made of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.query import QueryWeights, predict_query
from tandemkv.kernels.samples import attend_samples, make_sample_scratch
from tandemkv.kernels.score import KeyScan, make_score_scratch, score_keys
from tandemkv.kernels.select import make_select_scratch, score_topk
from tandemkv.kernels.stopwatch import event_us, median_us

from .measure import Timed

_DEFAULTS = SelectionSettings()

NEEDED_BYTES = 4 << 30
"""Free memory of the GPU that the largest of the measurements takes, with some room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed: by default eight requests of Qwen3-8B, with the settings of `serve`."""

    batch: int = 8
    qo_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 12288
    page: int = 64
    k: int = _DEFAULTS.budget_tokens
    num_sink: int = _DEFAULTS.num_sink_tokens
    num_recent: int = _DEFAULTS.num_recent_tokens
    resident: int = _DEFAULTS.num_resident
    fetch_cap: int = _DEFAULTS.fetch_cap_tokens
    missing: int = _DEFAULTS.fetch_cap_tokens
    copy_bytes: int = 512 << 20
    weight_rows: int = 49152
    num_matrices: int = 4


class DeviceTimings:
    """The operations that are timed, each by itself on an idle device; a batch in each."""

    def __init__(self, device: torch.device, sizes: Sizes | None = None) -> None:
        self._device, self._sizes = device, sizes or Sizes()
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    @cached_property
    def attention_by(self) -> Literal["flashinfer", "tandemkv"]:
        """FlashInfer's, which SGLang decodes with, if it is installed."""
        if self._device.type == "cuda" and find_spec("flashinfer") is not None:
            return "flashinfer"
        return "tandemkv"

    def copy(self) -> Timed:
        """Negate; bytes twice. Captured copies are a copy engine's, slower than the memory."""
        source = torch.zeros(self._sizes.copy_bytes // 4, device=self._device)
        target = torch.empty_like(source)
        return self._timed(2 * source.nbytes, lambda: torch.neg(source, out=target))

    def weights(self) -> Timed:
        """Multiply the batch by matrices that no cache holds."""
        sizes = self._sizes
        shape = (sizes.num_matrices, sizes.weight_rows, sizes.hidden)
        matrices, tokens = self._draw(*shape), self._draw(sizes.batch, sizes.hidden)

        def run() -> None:
            for matrix in matrices:
                F.linear(tokens, matrix)

        return self._timed(matrices.nbytes, run)

    def layer(self, batch: int) -> Timed:
        """Run a dense layer without attention, two after each other; the bytes of one's weights."""
        sizes = self._sizes
        width, kv_width = sizes.qo_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        shapes = (
            (width + 2 * kv_width, sizes.hidden),
            (sizes.hidden, width),
            (2 * sizes.intermediate, sizes.hidden),
            (sizes.hidden, sizes.intermediate),
        )
        layers = [[self._draw(*shape) for shape in shapes] for _ in range(2)]
        norm, head_norm = self._draw(sizes.hidden), self._draw(sizes.head_dim)
        angles = self._draw(batch, 1, sizes.head_dim)
        stream = self._draw(batch, sizes.hidden)

        def run() -> None:
            hidden = stream
            for qkv, output, up, down in layers:
                entry = F.rms_norm(hidden, (sizes.hidden,), norm)
                heads = F.linear(entry, qkv).view(batch, -1, sizes.head_dim)
                # Norm and RoPE of queries and keys, a kernel each.
                turned = F.rms_norm(heads, (sizes.head_dim,), head_norm) * angles
                hidden = hidden + F.linear(turned.reshape(batch, -1)[:, :width], output)
                gate, value = F.linear(F.rms_norm(hidden, (sizes.hidden,), norm), up).chunk(2, -1)
                hidden = hidden + F.linear(F.silu(gate) * value, down)

        timed = self._timed(sum(w.nbytes for layer in layers for w in layer), run)
        return Timed(timed.num_bytes / len(layers), timed.us / len(layers))

    def attention(self, tokens: int) -> Timed:
        """Attend to `tokens` of each request, one behind another; the bytes of K and V."""
        sizes = self._sizes
        shape = (sizes.batch * tokens, sizes.kv_heads, sizes.head_dim)
        keys, values = self._draw(*shape), self._draw(*shape)
        query = self._query()
        decode = _flashinfer_decode if self.attention_by == "flashinfer" else _own_decode
        return self._timed(keys.nbytes + values.nbytes, decode(query, keys, values, tokens))

    def scan(self, index_dtype: str, tokens: int) -> Timed:
        """Score with `max_logit`, which is one pass; the bytes of keys and scales."""
        sizes = self._sizes
        keys, scales = self._index(index_dtype, tokens)
        heads = (sizes.batch, sizes.qo_heads, sizes.kv_heads)
        scratch = make_score_scratch(*heads, tokens, self._device)
        out = torch.zeros(sizes.batch, sizes.kv_heads, tokens, device=self._device)
        common = self._scanned(tokens) | {"k_scale": scales, "pooling": "max_logit"}
        scan = KeyScan(self._query(), keys, **common)
        size = keys.nbytes + (0 if scales is None else scales.nbytes)
        return self._timed(size, lambda: score_keys(scan, out=out, scratch=scratch))

    def select(self, tokens: int) -> Timed:
        """Scan int4 keys and choose as a decode step does; 4 bytes for each key."""
        sizes = self._sizes
        keys, scales = self._index("int4", tokens)
        heads = (sizes.batch, sizes.qo_heads, sizes.kv_heads)
        scratch = make_select_scratch(*heads, tokens, sizes.k, self._device)
        scan = KeyScan(self._query(), keys, k_scale=scales, **self._scanned(tokens))
        return self._timed(
            4 * sizes.batch * sizes.kv_heads * tokens,
            lambda: score_topk(scan, sizes.k, scratch=scratch),
        )

    def predict(self) -> Timed:
        """Predict with the model's W_q, whose bytes count, a norm before and one of each head."""
        sizes, device = self._sizes, self._device
        weight = self._draw(sizes.qo_heads * sizes.head_dim, sizes.hidden)
        weights = QueryWeights(
            head_dim=sizes.head_dim,
            weight=weight,
            norm=self._draw(sizes.hidden),
            norm_eps=1e-6,
            query_norm=self._draw(sizes.head_dim),
            query_norm_eps=1e-6,
        )
        hidden = self._draw(sizes.batch, sizes.hidden)
        positions = torch.arange(sizes.batch, device=device)
        cos_sin = torch.rand(sizes.batch, sizes.head_dim, device=device)
        run = partial(predict_query, hidden, positions, weights, cos_sin)
        return self._timed(weight.nbytes, run)

    def gather(self) -> Timed:
        """Take the difference to a full resident set, and copy up to the cap; no bytes count."""
        sizes, device = self._sizes, self._device
        context = 4 * sizes.resident // sizes.page * sizes.page
        heads = (sizes.batch, sizes.kv_heads)
        order = torch.rand(*heads, context, device=device).argsort(-1).int()
        resident = order[..., : sizes.resident].contiguous()
        kept = resident[..., sizes.missing - sizes.k :]
        outside = order[..., sizes.resident : sizes.resident + sizes.missing]
        selected = torch.cat([kept, outside], -1).contiguous()
        used = torch.randint(0, 999, resident.shape, device=device, dtype=torch.int32)
        books = resident.clone(), used.clone()
        pools = self._draw(2, sizes.batch * context, sizes.kv_heads, sizes.head_dim)
        shape = (2, sizes.batch, sizes.resident, sizes.kv_heads, sizes.head_dim)
        sets = torch.zeros(shape, device=device, dtype=self._dtype)
        table, rows = self._slots(context // sizes.page), torch.arange(sizes.batch, device=device)
        options: dict[str, Any] = {
            "step": torch.tensor(1000, dtype=torch.int32, device=device),
            "num_protected": sizes.num_sink,
            "num_target": torch.full((sizes.batch,), sizes.resident, device=device),
            "hi": torch.full((sizes.batch,), context, device=device),
            "fetch_cap": sizes.fetch_cap,
            "selected_scores": torch.rand(selected.shape, device=device),
            "scratch": make_mirror_scratch(*heads, context, device, may_repeat=False),
        }

        def restore() -> None:
            books[0].copy_(resident)
            books[1].copy_(used)

        def run() -> None:
            at, to = mirror_diff(selected, books[0], books[1], **options)
            exchange_rows(
                pools[0], pools[1], table, at, to, sets[0], sets[1], rows, page_size=sizes.page
            )

        return self._timed(0, run, prepare=restore)

    def samples(self, count: int) -> Timed:
        """Attend to `count` samples, whose K and V count, and merge that into an output."""
        sizes, device = self._sizes, self._device
        pools = self._draw(2, sizes.batch * count, sizes.kv_heads, sizes.head_dim)
        query = self._query()
        slots, rows = self._slots(count), torch.arange(sizes.batch, device=device)
        weights = torch.zeros(sizes.batch, sizes.kv_heads, count, device=device)
        active = torch.ones(sizes.batch, dtype=torch.bool, device=device)
        out, lse = torch.zeros_like(query), torch.zeros(query.shape[:2], device=device)
        scale = sizes.head_dim**-0.5
        scratch = make_sample_scratch(sizes.batch, sizes.qo_heads, count, sizes.head_dim, device)
        return self._timed(
            pools.nbytes,
            lambda: attend_samples(
                query, pools[0], pools[1], slots, rows, weights, active, out, lse,
                scale=scale, lse_unit=1.0, scratch=scratch,
            ),
        )  # fmt: skip

    def host_copy(self) -> Timed | None:
        """Copy pinned memory; None on a CPU."""
        if self._device.type != "cuda":
            return None
        source = torch.empty(self._sizes.copy_bytes, dtype=torch.uint8, pin_memory=True)
        return self._copied(source)

    def peer_copy(self) -> Timed | None:
        """Copy the memory of the next GPU; None if there is none, or no peer access to it."""
        own = self._device.index or 0
        has_next = self._device.type == "cuda" and torch.cuda.device_count() >= own + 2
        if not has_next or not torch.cuda.can_device_access_peer(own, own + 1):
            return None
        other = torch.device("cuda", own + 1)
        return self._copied(torch.empty(self._sizes.copy_bytes, dtype=torch.uint8, device=other))

    def _copied(self, source: torch.Tensor) -> Timed:
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        copy = partial(target.copy_, source, non_blocking=True)
        times_us = [event_us(copy, self._device) for _ in range(8)]
        return Timed(source.nbytes, statistics.median(times_us[1:]))

    def _timed(
        self,
        num_bytes: int,
        run: Callable[[], object],
        prepare: Callable[[], object] = lambda: None,
    ) -> Timed:
        return Timed(num_bytes, median_us(run, self._device, prepare=prepare))

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._dtype)

    def _query(self) -> torch.Tensor:
        return self._draw(self._sizes.batch, self._sizes.qo_heads, self._sizes.head_dim)

    def _slots(self, count: int) -> torch.Tensor:
        """Return `count` slots, or pages, of each request, one behind another."""
        slots = torch.arange(self._sizes.batch * count, device=self._device, dtype=torch.int32)
        return slots.view(self._sizes.batch, count)

    def _scanned(self, tokens: int) -> dict[str, Any]:
        """Return what every scan of `tokens` of each request is given."""
        sizes, device = self._sizes, self._device
        end = tokens - sizes.num_recent
        return {
            "slots": self._slots(tokens // sizes.page),
            "lo": torch.full((sizes.batch,), sizes.num_sink, dtype=torch.int32, device=device),
            "hi": torch.full((sizes.batch,), end, dtype=torch.int32, device=device),
            "width": tokens,
            "scale": sizes.head_dim**-0.5,
            "page_size": sizes.page,
        }

    def _index(self, index_dtype: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return keys of one layer and their scales, of any content."""
        sizes, device = self._sizes, self._device
        shape = (sizes.batch * tokens, sizes.kv_heads, sizes.head_dim)
        if index_dtype == "native":
            return self._draw(*shape), None
        if index_dtype == "int8":
            codes = torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
            return codes, torch.rand(shape[:2], device=device)
        pages = sizes.batch * tokens // sizes.page
        packed = (pages, sizes.kv_heads, sizes.page, sizes.head_dim // 2)
        codes = torch.randint(0, 256, packed, device=device, dtype=torch.uint8)
        scales = torch.rand(pages, sizes.kv_heads, 2, sizes.head_dim, device=device)
        return codes, scales.half()


def _own_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: int
) -> Callable[[], object]:
    """Return tandemkv's decode attention over slots."""
    slots = torch.arange(len(keys), device=query.device, dtype=torch.int32).view(-1, tokens)
    ends = torch.full((len(query),), tokens, device=query.device)
    scale = query.shape[-1] ** -0.5
    return lambda: attend_paged(query, keys, values, slots, ends, scale=scale)


def _flashinfer_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: int
) -> Callable[[], object]:
    """Return FlashInfer's decode attention, planned, over pages of one token as SGLang has them."""
    import flashinfer

    (batch, qo_heads, head_dim), kv_heads, device = query.shape, keys.shape[1], query.device
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    begins = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    slots = torch.arange(batch * tokens, dtype=torch.int32, device=device)
    last = torch.ones(batch, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=qo_heads >= 4 * kv_heads,
        paged_kv_indptr_buffer=begins.clone(),
        paged_kv_indices_buffer=slots.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        begins, slots, last, qo_heads, kv_heads, head_dim, 1,
        q_data_type=query.dtype, kv_data_type=keys.dtype,
    )  # fmt: skip
    paged = keys.unsqueeze(1), values.unsqueeze(1)
    return lambda: wrapper.run(query, paged)
