# SPDX-License-Identifier: Apache-2.0
"""Predicted time per output token: a roofline with measured constants.

They are those of one H200 unless this machine was measured (`profile`).

Every term is bytes over a bandwidth plus a fixed cost. The prediction is for ranking placements
and for seeing what limits; it is not a measurement and is not to be quoted as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .placement import Placement, PlacementKind
from .shape import ModelShape
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConstants:
    """Constants of a machine, by default of one H200.

    That had SGLang 0.5.17, FlashInfer 0.6.15.post1, torch 2.11, bf16.

    Notes
    -----
    Where each is from, all with the shape of Qwen3-8B:

    - `weight_bandwidth`: reading 16.4 GB of weights once takes 3.9 ms.
    - `layer_overhead_us`, `request_layer_us`: what is left of SGLang's dense step (steps queued:
      5.1 ms at 1 x 2K, 7.6 ms at 8 x 8K on one GPU) without weights and attention.
    - `sparse_request_us`: what each request adds where it is selected for; with it predictions
      meet steps at batch 1 and 8 alike (decode_pages.json, batch1.json).
    - `tp_request_layer_us`: the same on two GPUs (5.0 ms at 8 x 8K). All-reduce latency is inside
      `layer_overhead_us`.
    - `attention_fixed_us`, `attention_bandwidth`: line through FlashInfer's decode kernel under a
      CUDA graph, tensor cores on: 8 x 32K 243 us, 8 x 64K 476 us; it meets 1 x 4K, 8 x 2K,
      8 x 8K and 64 x 4K within 8 %.
    - `scan_fixed_us`, `scan_bandwidth_*`: lines through `bench kernels`, score_keys: native 151 and
      293 us at 8 x 32K and 8 x 64K, int8 95 and 181 (docs/benchmarks/kernels.json); int4 89 us at
      8 x 64K since.
    - `scan_token_share`: of what channels that the index lacks would take, what goes by tokens and
      stays: 31, 51 and 72 us at 8 x 32K, 64K and 96K with 64 of 128 channels, and 49 and 88 with
      all (docs/benchmarks/scan_channels.json, rows `run_zh_`) give 0.05. It is 0.15, because on one
      GPU a scan competes with the weights for memory: with 0.05 a step of 8 x 64K would be 3 %
      shorter than it is.
    - `topk_fixed_us`, `topk_bandwidth`: bound, filter and choice of int4 keys, 21, 28 and 35 us at
      8 x 32K, 64K and 96K (the same rows). Of other keys 5 to 14 more.
    - `exchange_bandwidth`, `receive_bandwidth`: of the rows of a layer from one other GPU, over
      NVLink, and from all of them: 36 x 64K from three takes 365 us a layer, where the rest of a
      selection takes 220 (docs/benchmarks/decode_four_gpus.json).
    - `handover_us`: what a layer of the model takes longer for sending its residual stream to a
      second GPU, and for waiting for a flag that is up.
    - `selection_fixed_us`: norm, RoPE and launches of the prediction. Fitted, with `handover_us`,
      `exchange_bandwidth` and the overlaps, to decode with one, two and 1 + 1 GPUs at 8K to 96K
      and fetch caps of 128, 448 and 704 (docs/performance.md), which they meet within 5 %.
    - `gather_us`: mirror_diff 22 us and exchange_rows 4 us, every head fetching its cap.
    - `sample_weights_us`: what the mirror takes longer for weights of samples
      (docs/benchmarks/mirror.json).
    - `samples_fixed_us`, `samples_bandwidth`: attention over 128, 512 and 1024 samples, 4.8, 10.8
      and 18.5 us at batch 8 (docs/benchmarks/samples.json), and what a layer takes longer for 128
      in a step that attends to them behind the resident set: 8.3 to 9.4 us at batch 8, 9.0 to 10.0
      at batch 1.
    - `samples_overlap`: samples are attended to beside the resident set (decision record 36). How
      much of the shorter of the two hides behind the other, fitted to steps at the defaults with
      64 of 128 channels (docs/benchmarks/decode_calibrated.json, decode_cache_gpus.json), on one
      GPU, 1 + 1 and 1 + 3. With the present kernels those on one GPU are met within 1.5 %, those of
      1 + 1 within 3.5 %; 1 + 3 was not timed. A step of Qwen3-30B-A3B (decode_moe.json) takes 8 %
      longer than predicted, stock SGLang's 4 %.
    - `scan_overlap`, `in_process_overlap`: shares of what a scan reads, and of the rest of a
      selection, that hide behind the model when both use one GPU. Reading needs the memory
      bandwidth that the weights need; the rest is a few programs, and latency. Of it 0.19 to 0.22
      show at 1 x 16K to 1 x 64K, 8 x 32K and 8 x 64K, and 0.30 at 8 x 8K.
    - `origin`: whose constants these are, for a sentence.
    """

    weight_bandwidth: float = 4.2e12
    layer_overhead_us: float = 32.0
    request_layer_us: float = 0.9
    sparse_request_us: float = 0.6
    tp_request_layer_us: float = 1.6
    attention_fixed_us: float = 10.0
    attention_bandwidth: float = 4.61e12
    scan_fixed_us: float = 11.0
    scan_bandwidth_native: float = 3.78e12
    scan_bandwidth_int8: float = 3.24e12
    scan_bandwidth_int4: float = 3.87e12
    scan_token_share: float = 0.15
    topk_fixed_us: float = 14.0
    topk_bandwidth: float = 1.2e12
    exchange_bandwidth: float = 3.0e11
    receive_bandwidth: float = 4.5e11
    handover_us: float = 7.0
    selection_fixed_us: float = 10.0
    gather_us: float = 26.0
    sample_weights_us: float = 1.8
    samples_fixed_us: float = 7.0
    samples_bandwidth: float = 2.14e12
    samples_overlap: float = 0.45
    scan_overlap: float = 0.0
    in_process_overlap: float = 0.78
    origin: str = "one H200"

    def scan_bandwidth(self, index_dtype: str) -> float:
        """Return the bytes per second at which keys of `index_dtype` are scored."""
        return float(getattr(self, f"scan_bandwidth_{index_dtype}"))


H200 = CostConstants()
"""What predictions are made with where no profile of the machine was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Parts of one decode step, in ms; `parts` add up to its time.

    `exposed_selection_ms` is what of the selection, exchange included, the model's own work
    does not hide.
    """

    weights_ms: float
    overhead_ms: float
    attention_ms: float
    exact_layers_ms: float = 0.0
    exposed_selection_ms: float = 0.0
    selection_ms: float = 0.0

    @property
    def tpot_ms(self) -> float:
        """Time per output token."""
        return sum(time for _, time in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Name and ms of each part of the sum."""
        return (
            ("weights", self.weights_ms),
            ("launches and collectives", self.overhead_ms),
            ("attention", self.attention_ms),
            ("exact layers", self.exact_layers_ms),
            ("selection", self.exposed_selection_ms),
        )

    @property
    def limit(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda part: part[1])[0]

    def describe(self) -> str:
        """Return the parts in ms, largest first."""
        parts = sorted(self.parts, key=lambda part: -part[1])
        return " + ".join(f"{name} {time:.2f}" for name, time in parts if time)


def predict_step(
    placement: Placement, shape: ModelShape, load: Workload, cost: CostConstants = H200
) -> StepTime:
    """Predict one decode step with every request at the full context.

    The batch is the `concurrency` of `load`, the length its `context_tokens`. While everything is
    resident nothing is selected and no layer is exact.
    """
    layer = LayerTimes(shape, load, cost)
    tp_size, layers, batch = placement.tp_size, shape.num_layers, load.concurrency
    per_request = cost.request_layer_us if tp_size == 1 else cost.tp_request_layer_us
    weights_us = shape.step_weight_bytes(batch) / tp_size / cost.weight_bandwidth * 1e6
    overhead_us = layers * (cost.layer_overhead_us + batch * per_request)
    shards = min(tp_size, shape.num_kv_heads)  # more GPUs have the same heads again
    dense_us = layer.attention_us(load.context_tokens, shards)
    full = shape.num_full_layers
    window_us = layer.attention_us(min(load.context_tokens, shape.window), shards)
    others_us = len(shape.windowed_layers) * window_us + layer.states_us(tp_size)
    if placement.kind is PlacementKind.DENSE or not load.is_sparse:
        return StepTime(
            weights_ms=weights_us / 1e3,
            overhead_ms=overhead_us / 1e3,
            attention_ms=(full * dense_us + others_us) / 1e3,
        )
    overhead_us += full * batch * cost.sparse_request_us
    exact = min(len(set(load.exact_layers) - set(shape.other_layers)), full)
    exact = full if load.all_exact else exact
    sparse = full - exact
    resident_us = layer.attention_us(min(load.context_tokens, load.set_tokens), shards)
    beside_us = layer.samples_us(shards)
    resident_us += beside_us - cost.samples_overlap * min(resident_us, beside_us)
    # What follows an anchor takes its rows and no more.
    num_scanned = load.num_scanned(layers, shape.other_layers)
    scanned = min(1.0, num_scanned / max(1, sparse))
    if placement.kind is PlacementKind.IN_PROCESS:
        select_us, exposed_us = layer.own_selection(shards, scanned)
        exact_us = dense_us
    else:
        model_us = (weights_us + overhead_us) / layers + resident_us
        select_us, exposed_us = layer.remote_selection(placement, scanned, sparse, model_us)
        # The query goes there, its output comes back.
        exact_us = 2 * cost.handover_us + layer.remote_attention_us(placement)
    if not load.selects:
        select_us = exposed_us = 0.0
    return StepTime(
        weights_ms=weights_us / 1e3,
        overhead_ms=overhead_us / 1e3,
        attention_ms=(sparse * resident_us + others_us) / 1e3,
        exact_layers_ms=exact * exact_us / 1e3,
        exposed_selection_ms=sparse * exposed_us / 1e3,
        selection_ms=sparse * select_us / 1e3,
    )


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times of the parts of one layer, in us. `num_shards` GPUs have a part of its heads each."""

    shape: ModelShape
    load: Workload
    cost: CostConstants = H200

    def own_selection(self, num_shards: int, scanned: float) -> tuple[float, float]:
        """Return a selection on the model's GPU, and what of it shows.

        `scanned` is the share of the layers whose keys are scanned.
        """
        cost, load = self.cost, self.load
        rest_us = (1 - scanned) * self.gather_us
        select_us = scanned * self.selection_us(num_shards, load.own_predictor_dtype) + rest_us
        if load.waits:
            return select_us, select_us - rest_us * cost.in_process_overlap
        scanned_us = scanned * (self.scan_us(num_shards) - cost.scan_fixed_us)
        exposed_us = scanned_us * (1 - cost.scan_overlap)
        return select_us, exposed_us + (select_us - scanned_us) * (1 - cost.in_process_overlap)

    def remote_selection(
        self, placement: Placement, scanned: float, sparse: int, model_us: float
    ) -> tuple[float, float]:
        """Return a selection on a cache GPU, and what of it shows.

        `model_us` is the model's own time a layer, `sparse` the number of layers that select.
        """
        cost, load, parts = self.cost, self.load, self._num_parts(placement)
        own_us = self.selection_us(parts, load.predictor_dtype)
        rows_us = self.exchange_us(placement.tp_size, parts)
        select_us = scanned * own_us + (1 - scanned) * self.gather_us + rows_us
        own_us += rows_us
        if load.waits:
            return select_us, cost.handover_us + scanned * own_us
        # An anchor's selection has one layer to hide behind, however few anchors there are.
        exposed_us = scanned * max(cost.handover_us, own_us - model_us)
        exposed_us += (1 - scanned) * cost.handover_us
        # Of the first layer, which has none before it to hide behind, unless the last step has
        # selected for it; beside that step's logits one layer hides.
        has_exact = sparse < self.shape.num_layers
        if not has_exact and not load.num_late:
            exposed_us += own_us / max(1, sparse)
        return select_us, exposed_us

    def _num_parts(self, placement: Placement) -> float:
        """Return as what fraction of the KV heads the cache GPU with the most of them has."""
        heads = self.shape.num_kv_heads
        return heads / math.ceil(heads / placement.num_cache_gpus)

    def remote_attention_us(self, placement: Placement) -> float:
        """Return the time of an exact layer's attention where the K/V are.

        Of several cache GPUs one has the layer, and the others read it over NVLink.
        """
        parts, tokens = self._num_parts(placement), self.load.context_tokens
        size = self.load.concurrency * tokens * self.shape.kv_layer_token_bytes / parts
        far_us = self.cost.attention_fixed_us + size / self.cost.exchange_bandwidth * 1e6
        here = placement.tp_size / placement.num_cache_gpus
        return here * self.attention_us(tokens, parts) + (1 - here) * far_us

    def attention_us(self, tokens: int, num_shards: float) -> float:
        """Return the time of decode attention over `tokens` tokens of each request."""
        size = self.load.concurrency * tokens * self.shape.kv_layer_token_bytes / num_shards
        return self.cost.attention_fixed_us + size / self.cost.attention_bandwidth * 1e6

    def states_us(self, num_shards: float) -> float:
        """Return the time in which all layers of linear attention read and write their states.

        An estimate: it was not measured. A kernel's fixed part is taken to be that of attention.
        """
        size = 2 * self.load.concurrency * self.shape.state_bytes / num_shards
        fixed = len(self.shape.linear_layers) * self.cost.attention_fixed_us
        return fixed + size / self.cost.attention_bandwidth * 1e6

    def selection_us(self, num_shards: float, predictor_dtype: str = "native") -> float:
        """Return the time to predict, scan, choose and gather on one shard.

        `predictor_dtype` is that of the W_q that is read, a copy unless ``native``.
        """
        shape, cost = self.shape, self.cost
        size = shape.predictor_copy_bytes(predictor_dtype)
        predictor = size / shape.num_full_layers / num_shards / cost.weight_bandwidth
        topk = self._num_keys(num_shards) * 4 / cost.topk_bandwidth
        fixed = cost.selection_fixed_us + cost.topk_fixed_us + self.gather_us
        return (predictor + topk) * 1e6 + self.scan_us(num_shards) + fixed

    def _num_keys(self, num_shards: float) -> float:
        """Return the keys of one shard, of all requests."""
        keys = self.load.concurrency * self.load.context_tokens * self.shape.num_kv_heads
        return keys / num_shards

    def samples_us(self, num_shards: float) -> float:
        """Return the time of attention over samples, alone, merged into the other."""
        if not self.load.num_samples:
            return 0.0
        tokens = self.load.concurrency * self.load.num_samples
        size = tokens * self.shape.kv_layer_token_bytes / num_shards
        return self.cost.samples_fixed_us + size / self.cost.samples_bandwidth * 1e6

    @property
    def gather_us(self) -> float:
        """Time to compare a choice with its mirror and to copy what is missing."""
        return self.cost.gather_us + (self.cost.sample_weights_us if self.load.num_samples else 0.0)

    def exchange_us(self, tp_size: int, num_parts: float = 1) -> float:
        """Return the time of the rows to each of the model's GPUs, of which there are `tp_size`.

        Every head fetches its cap. A cache GPU sends one of `num_parts` parts, and all that a GPU
        of the model needs comes to it.
        """
        tokens = self.load.concurrency * self.load.fetch_cap_tokens
        size = tokens * self.shape.kv_layer_token_bytes
        sent_s = size / max(num_parts, tp_size) / self.cost.exchange_bandwidth
        received_s = size / tp_size / self.cost.receive_bandwidth
        return max(sent_s, received_s) * 1e6

    def scan_us(self, num_shards: float) -> float:
        """Return the time to score every key of one shard."""
        load, cost = self.load, self.cost
        size = self._num_keys(num_shards) * load.index_head_token_bytes(self.shape)
        if load.index_channels is not None:
            dropped = self.shape.head_dim / load.index_channels - 1
            size *= 1 + cost.scan_token_share * dropped
        return cost.scan_fixed_us + size / cost.scan_bandwidth(load.index_dtype) * 1e6
