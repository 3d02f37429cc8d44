# SPDX-License-Identifier: Apache-2.0
"""Measures, for evaluation, how much of the true attention mass a decode step attends to.

With ``evaluation`` on and ``TANDEMKV_PROBE_FILE`` set, the probe compares in float64, every
`PROBE_EVERY` decode steps: the softmax mass over all tokens that falls on the attended ones, and on
the same number of tokens chosen by the true query (the oracle); recall is the share of the oracle's
tokens that are attended to. A sample is one token of these, however much it stands for.
One JSON line per probed (step, request, layer). ``TANDEMKV_PROBE_DETAIL=1`` probes every step and
adds the sets of attended positions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.bitmap import position_bits
from tandemkv.cache_rank.protocol.engine import PADDING_ROW
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    DETAIL_VARIABLE,
    PROBE_VARIABLE,
    RankSettings,
)
from tandemkv.kernels.samples import sample_offsets

PROBE_EVERY = 8


class AttentionProbe:
    """Recovered attention mass of sparse requests. Costs time, and waits for the device.

    Lines are appended to `path`. `keys` are those of SGLang's pool, per layer ``[slots, H, D]``.
    `resident_positions` returns the position in each resident slot of a layer, ``[rows, H, R]``;
    None where the sink is all. ``log_weight [L, rows, H, num_samples]`` is the weight with which
    samples count, ``-inf`` for not at all.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: ModelSpec,
        settings: RankSettings,
        keys: Sequence[torch.Tensor],
        resident_positions: Callable[[int], torch.Tensor | None],
        log_weight: torch.Tensor | None,
    ) -> None:
        self._path, self._model, self._selection = path, model, settings.selection
        self._keys, self._positions, self._log_weight = keys, resident_positions, log_weight
        self._is_detailed = os.environ.get(DETAIL_VARIABLE) == "1"
        self._every = 1 if self._is_detailed else PROBE_EVERY
        self._requests: list[tuple[int, int, int, int, bool]] = []
        self._step = 0

    @classmethod
    def from_environment(
        cls, *, settings: RankSettings, has_graphs: bool, **given: Any
    ) -> AttentionProbe | None:
        """Return the probe that was asked for, of the other arguments `given`; or None.

        Raises `SettingsError` if decode steps are captured in CUDA graphs, which nobody can look
        into.
        """
        path = os.environ.get(PROBE_VARIABLE)
        if not path or not settings.evaluation:
            return None
        if has_graphs:
            raise SettingsError(
                f"{PROBE_VARIABLE}: decode steps in CUDA graphs cannot be looked into; add -- "
                "--disable-cuda-graph"
            )
        return cls(Path(path), settings=settings, **given)

    def begin_step(
        self, rows: torch.Tensor, lengths: torch.Tensor, generations: torch.Tensor,
        *, num_dense: int, slow: torch.Tensor | None, step: int,
    ) -> None:  # fmt: skip
        """Take note of a decode step: ``rows, lengths [B]``, ``generations [rows]``.

        Requests of up to `num_dense` tokens are not looked at; `slow` ``[B]`` bool ones attend to
        everything.
        """
        self._requests, self._step = [], step
        if step % self._every:
            return
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            if row != PADDING_ROW and length > num_dense:
                is_slow = slow is not None and bool(slow[i])
                self._requests.append((i, row, int(generations[row]), length, is_slow))

    def after_layer(self, layer: int, query: torch.Tensor, req_to_token: torch.Tensor) -> None:
        """Measure a layer that has just attended with ``query [B, Hq, D]``.

        ``req_to_token [rows, max_context]``: the slot of each position.
        """
        for i, row, generation, length, is_slow in self._requests:
            keys = self._keys[layer][req_to_token[row, :length].long()]
            attended = self._attended(layer, row, length, is_slow=is_slow)
            self._write(layer, row, generation, length, query[i], keys, attended)

    def _attended(self, layer: int, row: int, length: int, *, is_slow: bool) -> torch.Tensor:
        """Return which positions each KV head attends to, ``[H, length]`` bool."""
        heads, device = self._model.num_kv_heads, self._keys[layer].device
        found = torch.full((heads, length), is_slow, device=device)
        if is_slow:
            return found
        selection = self._selection
        ring_start = max(0, length - selection.num_recent_tokens)
        filled = min(selection.num_resident, ring_start)
        books = self._positions(layer)
        if books is None:
            positions = torch.arange(filled, device=device).expand(heads, -1)
        else:
            positions = books[row, :, :filled].to(device, torch.int64)
        if bool((positions < 0).any()) or bool((positions >= ring_start).any()):
            raise AssertionError(f"resident set of layer {layer} row {row} has a hole")
        found[:, ring_start:] = True
        found.scatter_(1, positions, True)
        if self._log_weight is not None:
            count = torch.tensor(max(0, ring_start - selection.num_sink_tokens))
            offsets, _ = sample_offsets(count, selection.num_samples)
            index = (offsets >= 0).nonzero()[:, 0].to(device)
            places = offsets.to(device)[index] + selection.num_sink_tokens
            found[:, places] |= self._log_weight[layer, row][:, index] > float("-inf")
        return found

    def _write(
        self, layer: int, row: int, generation: int, length: int, query: torch.Tensor,
        keys: torch.Tensor, attended: torch.Tensor,
    ) -> None:  # fmt: skip
        heads = self._model.num_kv_heads
        grouped = query.double().view(heads, -1, self._model.head_dim)
        logits = torch.einsum("hgd,nhd->hgn", grouped, keys.double()) * self._model.scale
        mass = torch.softmax(logits, dim=-1).mean(dim=1)  # [H, length]
        count = int(attended.sum(-1).max())
        top = mass.topk(count, dim=-1)
        recall = attended.gather(1, top.indices).double().mean(-1)
        line = {
            "decode_step": self._step,
            "row": row,
            "layer": layer,
            "length": length,
            "attended": count,
            "mass": (mass * attended).sum(-1).tolist(),
            "oracle_mass": top.values.sum(-1).tolist(),
            "recall": recall.tolist(),
        }
        if self._is_detailed:
            line["generation"] = generation
            sets = (is_in.nonzero()[:, 0] for is_in in attended)
            line["attended_bits"] = [position_bits(found, length) for found in sets]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
