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
    tp_size, layers, batch = placement.tp_size, shape.num_layers, load.concurrency
    per_request = cost.request_layer_us if tp_size == 1 else cost.tp_request_layer_us
    weights_us = shape.step_weight_bytes(batch) / tp_size / cost.weight_bandwidth * 1e6
    overhead_us = layers * (cost.layer_overhead_us + batch * per_request)
    shards = min(tp_size, shape.num_kv_heads)  # more GPUs have the same heads again
    dense_us = attention_us(shape, batch, load.context_tokens, shards, cost)
    full = shape.num_full_layers
    window_tokens = min(load.context_tokens, shape.window)
    windows = len(shape.windowed_layers)
    others_us = windows * attention_us(shape, batch, window_tokens, shards, cost)
    others_us += states_us(shape, batch, tp_size, cost)
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
    set_tokens = min(load.context_tokens, load.set_tokens)
    resident_us = attention_us(shape, batch, set_tokens, shards, cost)
    beside_us = samples_us(shape, load, shards, cost)
    resident_us += beside_us - cost.samples_overlap * min(resident_us, beside_us)
    model_us = (weights_us + overhead_us) / layers + resident_us
    # What follows an anchor takes its rows and no more.
    num_scanned = load.num_scanned(layers, shape.other_layers)
    scanned = min(1.0, num_scanned / max(1, sparse))
    if placement.kind is PlacementKind.IN_PROCESS:
        select_us, exposed_us = _own_selection(placement, shape, load, scanned, cost)
        exact_us = dense_us
    else:
        select_us, exposed_us = _remote_selection(
            placement, shape, load, scanned, model_us=model_us, sparse=sparse, cost=cost
        )
        # The query goes there, its output comes back.
        exact_us = 2 * cost.handover_us + _remote_attention_us(placement, shape, load, cost)
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


def _own_selection(
    placement: Placement, shape: ModelShape, load: Workload, scanned: float, cost: CostConstants
) -> tuple[float, float]:
    """Return a layer's selection on the model's GPU, and what of it shows, in us.

    `scanned` is the share of the layers whose keys are scanned.
    """
    rest_us = (1 - scanned) * gather_us(load, cost)
    shards = min(placement.tp_size, shape.num_kv_heads)
    whole_us = selection_us(shape, load, shards, cost, load.own_predictor_dtype)
    select_us = scanned * whole_us + rest_us
    if load.waits:
        return select_us, select_us - rest_us * cost.in_process_overlap
    scanned_us = scanned * (scan_us(shape, load, shards, cost) - cost.scan_fixed_us)
    exposed_us = scanned_us * (1 - cost.scan_overlap)
    return select_us, exposed_us + (select_us - scanned_us) * (1 - cost.in_process_overlap)


def _remote_selection(
    placement: Placement,
    shape: ModelShape,
    load: Workload,
    scanned: float,
    *,
    model_us: float,
    sparse: int,
    cost: CostConstants,
) -> tuple[float, float]:
    """Return a layer's selection on a cache GPU, and what of it shows, in us.

    `model_us` is the model's own time a layer, `sparse` the number of layers that select.
    """
    parts = _num_parts(placement, shape)
    own_us = selection_us(shape, load, parts, cost, load.predictor_dtype)
    rows_us = exchange_us(shape, load, placement.tp_size, cost, parts)
    select_us = scanned * own_us + (1 - scanned) * gather_us(load, cost) + rows_us
    own_us += rows_us
    if load.waits:
        return select_us, cost.handover_us + scanned * own_us
    # An anchor's selection has one layer to hide behind, however few anchors there are.
    exposed_us = scanned * max(cost.handover_us, own_us - model_us)
    exposed_us += (1 - scanned) * cost.handover_us
    # Of the first layer, which has none before it to hide behind, unless the last step has selected
    # for it; beside that step's logits one layer hides.
    has_exact = sparse < shape.num_layers
    if not has_exact and not load.num_late:
        exposed_us += own_us / max(1, sparse)
    return select_us, exposed_us


def _num_parts(placement: Placement, shape: ModelShape) -> float:
    """Return as what fraction of the KV heads the cache GPU with the most of them has."""
    return shape.num_kv_heads / math.ceil(shape.num_kv_heads / placement.num_cache_gpus)


def _remote_attention_us(
    placement: Placement, shape: ModelShape, load: Workload, cost: CostConstants
) -> float:
    """Return the time of an exact layer's attention where the K/V are, in us.

    Of several cache GPUs one has the layer, and the others read it over NVLink.
    """
    parts, batch = _num_parts(placement, shape), load.concurrency
    near_us = attention_us(shape, batch, load.context_tokens, parts, cost)
    size = batch * load.context_tokens * shape.kv_layer_token_bytes / parts
    far_us = cost.attention_fixed_us + size / cost.exchange_bandwidth * 1e6
    here = placement.tp_size / placement.num_cache_gpus
    return here * near_us + (1 - here) * far_us


def attention_us(
    shape: ModelShape, batch: int, tokens: int, num_shards: float, cost: CostConstants
) -> float:
    """Return the time of one layer's decode attention over `tokens` tokens of each request."""
    size = batch * tokens * shape.kv_layer_token_bytes / num_shards
    return cost.attention_fixed_us + size / cost.attention_bandwidth * 1e6


def states_us(shape: ModelShape, batch: int, num_shards: float, cost: CostConstants) -> float:
    """Return the time in which all layers of linear attention read and write their states.

    An estimate: it was not measured. A kernel's fixed part is taken to be that of attention.
    """
    size = 2 * batch * shape.state_bytes / num_shards
    fixed = len(shape.linear_layers) * cost.attention_fixed_us
    return fixed + size / cost.attention_bandwidth * 1e6


def selection_us(
    shape: ModelShape,
    load: Workload,
    num_shards: float,
    cost: CostConstants,
    predictor_dtype: str = "native",
) -> float:
    """Return the time to predict, scan, choose and gather for one layer on one of its shards.

    `predictor_dtype` is that of the W_q that is read, a copy unless ``native``.
    """
    size = shape.predictor_copy_bytes(predictor_dtype)
    predictor = size / shape.num_full_layers / num_shards / cost.weight_bandwidth
    keys = load.concurrency * load.context_tokens * shape.num_kv_heads / num_shards
    scan = scan_us(shape, load, num_shards, cost)
    topk = keys * 4 / cost.topk_bandwidth
    fixed = cost.selection_fixed_us + cost.topk_fixed_us + gather_us(load, cost)
    return (predictor + topk) * 1e6 + scan + fixed


def samples_us(shape: ModelShape, load: Workload, num_shards: float, cost: CostConstants) -> float:
    """Return the time of one layer's attention over samples, alone, merged into the other."""
    if not load.num_samples:
        return 0.0
    size = load.concurrency * load.num_samples * shape.kv_layer_token_bytes / num_shards
    return cost.samples_fixed_us + size / cost.samples_bandwidth * 1e6


def gather_us(load: Workload, cost: CostConstants) -> float:
    """Return the time to compare a layer's choice with its mirror and to copy what is missing."""
    return cost.gather_us + (cost.sample_weights_us if load.num_samples else 0.0)


def exchange_us(
    shape: ModelShape, load: Workload, tp_size: int, cost: CostConstants, num_parts: float = 1
) -> float:
    """Return the time of one layer's rows to each of the model's GPUs, in us.

    Every head fetches its cap. A cache GPU sends one of `num_parts` parts, and all that a GPU of
    the model needs comes to it.
    """
    size = load.concurrency * load.fetch_cap_tokens * shape.kv_layer_token_bytes
    sent_s = size / max(num_parts, tp_size) / cost.exchange_bandwidth
    received_s = size / tp_size / cost.receive_bandwidth
    return max(sent_s, received_s) * 1e6


def scan_us(shape: ModelShape, load: Workload, num_shards: float, cost: CostConstants) -> float:
    """Return the time to score every key of one layer on one of its shards."""
    keys = load.concurrency * load.context_tokens * shape.num_kv_heads / num_shards
    size = keys * load.index_head_token_bytes(shape)
    if load.index_channels is not None:
        dropped = shape.head_dim / load.index_channels - 1
        size *= 1 + cost.scan_token_share * dropped
    return cost.scan_fixed_us + size / cost.scan_bandwidth(load.index_dtype) * 1e6
