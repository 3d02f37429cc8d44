# SPDX-License-Identifier: Apache-2.0
"""Measures, for evaluation, how much of the true attention mass a decode step attends to.

With ``evaluation`` on and ``TANDEMKV_PROBE_FILE`` set, the probe keeps its own copy of the
keys of every request and, every `PROBE_EVERY` decode steps, compares in float64: the softmax
mass over all tokens that falls on the attended ones, and on the same number of tokens chosen
by the true query (the oracle); recall is the share of the oracle's tokens that are attended to.
A sample is one token of these, however much it stands for.
One JSON line per probed (step, layer). ``TANDEMKV_PROBE_DETAIL=1`` probes every step and
adds the sets of attended positions.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandemkv.cache_rank.protocol.bitmap import position_bits
from tandemkv.cache_rank.protocol.settings import DETAIL_VARIABLE, PROBE_VARIABLE

from .decode_step import DecodeStep
from .extend_step import ExtendStep

if TYPE_CHECKING:
    from .runtime import Runtime

PROBE_EVERY = 8


class AttentionProbe:
    """Recovered attention mass of sparse rows in selecting layers. Costs time and memory."""

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self._runtime = runtime
        self._path = path
        self._is_detailed = os.environ.get(DETAIL_VARIABLE) == "1"
        self._every = 1 if self._is_detailed else PROBE_EVERY
        self._keys: dict[tuple[int, int, int], torch.Tensor] = {}

    @classmethod
    def from_settings(cls, runtime: Runtime) -> AttentionProbe | None:
        """Return the probe, if evaluation is on and a file was asked for."""
        path = os.environ.get(PROBE_VARIABLE)
        if not path or not runtime.settings.evaluation:
            return None
        return cls(runtime, Path(path))

    def after_layer(
        self, layer: int, step: ExtendStep | DecodeStep, q: torch.Tensor, k: torch.Tensor
    ) -> None:
        """Record the keys of a layer and, in probed decode steps, its recovered mass.

        Parameters
        ----------
        layer : int
            Layer id.
        step : ExtendStep or DecodeStep
            The step whose attention was just computed.
        q, k : torch.Tensor
            ``[T, num_qo_heads, head_dim]`` and ``[T, num_kv_heads, head_dim]``.
        """
        start = 0
        for row in step.row_steps:
            end = start + row.length - row.prefix_len
            self._record(layer, row.row, row.generation, row.prefix_len, k[start:end])
            start = end
        if isinstance(step, DecodeStep) and self._runtime.decode_step % self._every == 0:
            for i, row in enumerate(step.row_steps):
                if row.flags and layer not in self._runtime.settings.selection.exact_layer_ids:
                    self._measure(layer, row.row, row.generation, row.length, q[i])

    def _record(
        self, layer: int, row: int, generation: int, prefix_len: int, k: torch.Tensor
    ) -> None:
        key = (layer, row, generation)
        old = self._keys.get(key)
        if old is None:
            self._keys = {x: t for x, t in self._keys.items() if x[:2] != (layer, row)}
            old = k.new_empty(0, *k.shape[1:])
        # A prefix from the radix cache never passes here: such requests are not probed.
        if old.shape[0] == prefix_len:
            self._keys[key] = torch.cat((old, k))

    def _measure(self, layer: int, row: int, generation: int, length: int, q: torch.Tensor) -> None:
        runtime = self._runtime
        keys = self._keys.get((layer, row, generation))
        if keys is None or keys.shape[0] != length:
            return
        heads, dim = runtime.model.num_kv_heads, runtime.model.head_dim
        grouped = q.double().view(heads, -1, dim)
        logits = torch.einsum("hgd,nhd->hgn", grouped, keys.double()) * runtime.model.scale
        mass = torch.softmax(logits, dim=-1).mean(dim=1)  # [H, length]
        resident = runtime.resident
        ring_start = max(0, length - resident.ring)
        filled = min(resident.num_resident, ring_start)
        positions = resident.positions[layer, row, :, :filled].to(torch.int64)
        if bool((positions < 0).any()) or bool((positions >= ring_start).any()):
            raise AssertionError(f"resident set of layer {layer} row {row} has a hole")
        is_attended = torch.zeros_like(mass, dtype=torch.bool)
        is_attended[:, ring_start:] = True
        is_attended.scatter_(1, positions, True)
        samples = resident.samples
        if samples is not None:
            index, places = samples.positions(length)
            is_counted = samples.log_weight[layer, row][:, index] > float("-inf")
            is_attended[:, places] |= is_counted
        got = (mass * is_attended).sum(-1)
        count = min(length, resident.num_visible(length))
        top = mass.topk(count, dim=-1)
        recall = is_attended.gather(1, top.indices).double().mean(-1)
        line = {
            "decode_step": runtime.decode_step,
            "row": row,
            "layer": layer,
            "length": length,
            "attended": count,
            "mass": got.tolist(),
            "oracle_mass": top.values.sum(-1).tolist(),
            "recall": recall.tolist(),
            "distinct": int(torch.unique(positions[0]).numel()) == filled,
        }
        if self._is_detailed:
            line["generation"] = generation
            sets = (is_in.nonzero()[:, 0] for is_in in is_attended)
            line["attended_bits"] = [position_bits(found, length) for found in sets]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
