# SPDX-License-Identifier: Apache-2.0
"""A small model's pool with requests in it, and the engine that serves it."""

from __future__ import annotations

from pathlib import Path

import torch

from tandemkv.cache_rank.engine.cache_engine import CacheEngine
from tandemkv.cache_rank.engine.factory import create
from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine import DenseLengths, EnginePools
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

LAYERS, HEADS, QUERY_HEADS, DIM, ROWS1, CONTEXT = 6, 2, 4, 16, 4, 256
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=LAYERS,
    num_qo_heads=QUERY_HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    hidden_size=QUERY_HEADS * DIM,
    max_context=CONTEXT,
    dtype="float32",
    model_hash="0",
)


class World:
    """A pool with requests in scattered pages, and the rank that serves it."""

    def __init__(
        self, *, page_size: int = 16, model_dir: Path | None = None, **selection: object
    ) -> None:
        self.model_dir = model_dir
        chosen = {
            "policy": "look_ahead",
            "budget_tokens": 32,
            "resident_factor": 1.5,
            "num_sink_tokens": 4,
            "num_recent_tokens": 16,
            "fetch_cap": 8,
            "exact_layers": (0,),
            **selection,
        }
        self.settings = RankSettings.model_validate(
            {"selection": selection_values(chosen), "placement": {"link": "local"}}
        )
        self.width = self.settings.selection.num_resident
        self.lengths = DenseLengths.of(self.settings.selection, self.width)
        self.page_size = page_size
        generator = torch.Generator().manual_seed(7)
        self.generator = generator
        num_slots = 64 * 16
        shape = (num_slots + ROWS1 * self.width, HEADS, DIM)
        pools = [torch.randn(shape, generator=generator) for _ in range(2 * LAYERS)]
        resident = [pool[num_slots:].view(ROWS1, self.width, HEADS, DIM) for pool in pools]
        self.pools = EnginePools(
            k=[pool[:num_slots] for pool in pools[:LAYERS]],
            v=[pool[:num_slots] for pool in pools[LAYERS:]],
            resident=list(zip(resident[:LAYERS], resident[LAYERS:], strict=True)),
            page_size=page_size,
            log_weight=torch.full(
                (LAYERS, ROWS1, HEADS, self.settings.selection.num_samples), float("nan")
            )
            if self.settings.selection.num_samples
            else None,
        )
        num_pages = CONTEXT // page_size
        order = torch.randperm(num_slots // page_size - 1, generator=generator) + 1
        self.table = torch.zeros((ROWS1, CONTEXT), dtype=torch.int32)
        for row in range(1, ROWS1):
            pages = order[(row - 1) * num_pages : row * num_pages]
            slots = pages[:, None] * page_size + torch.arange(page_size)
            self.table[row] = slots.reshape(-1).to(torch.int32)
        self.rank = self.make()

    def make(self) -> CacheEngine:
        """Build the rank; queries are the hidden state itself."""
        return create(
            model=MODEL,
            settings=self.settings,
            pools=self.pools,
            max_batch=4,
            predict_query=lambda _layer, hidden, _positions: hidden.view(-1, QUERY_HEADS, DIM),
            model_dir=self.model_dir,
        )

    def prefill(self, row: int, length: int) -> None:
        """Index and seed a prompt of `length` tokens."""
        table = self.table[row, :length]
        self.rank.begin_extend([row], [0], [length], [table])
        for layer in range(LAYERS):
            if self.rank.program.is_sparse_layer(layer):
                self.rank.extend(layer, table.long())
                queries = torch.randn((8, QUERY_HEADS, DIM), generator=self.generator)
                self.rank.seed(layer, 0, row, queries)

    def decode(
        self, rows: list[int], lengths: list[int], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one step's selections; returns the hidden state ``[B, hidden]``, or a random one."""
        self.rank.begin_step()
        self.rank.begin_decode(torch.tensor(rows), torch.tensor(lengths), self.table)
        if hidden is None:
            hidden = torch.randn((len(rows), QUERY_HEADS * DIM), generator=self.generator)
        for layer in range(LAYERS):
            for target in self.rank.program.targets_of(layer):
                self.rank.choose_ahead(target, hidden)
                self.rank.fetch(target, len(rows))
            self.rank.append(layer, len(rows))
        for late in self.rank.program.late_layers:
            self.rank.choose_late(late, hidden)
            self.rank.fetch(late, len(rows))
        return hidden

    def best(
        self, layer: int, row: int, hi: int, hidden: torch.Tensor, k: int, pooling: str = "softmax"
    ) -> torch.Tensor:
        """The `k` best candidates of a row, best first, in float64: ``[H, k]``."""
        query = hidden.view(HEADS, QUERY_HEADS // HEADS, DIM).double()
        keys = self.pools.k[layer][self.table[row, 4:hi].long()].double()
        logits = torch.einsum("hgd,nhd->hgn", query, keys) * MODEL.scale
        pooled = logits.amax(1) if pooling == "max_logit" else torch.softmax(logits, -1).mean(1)
        return pooled.topk(k).indices + 4

    def resident(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K of the resident set ``[R, H, D]`` and its positions ``[H, R]``."""
        book = self.rank.program.book_of(layer)
        return self.pools.resident[layer][0][row], self.rank._mirror.positions[book, row]

    def check_books(self, layer: int, row: int, length: int) -> None:
        """The set holds what the books say: distinct candidates, no hole, sink included."""
        keys, positions = self.resident(layer, row)
        length += layer in self.rank.program.late_layers  # as of the next step
        hi = length - self.settings.selection.num_recent_tokens
        filled = min(self.width, hi)
        for head in range(HEADS):
            held = positions[head, :filled].long()
            assert (held >= 0).all()
            assert (held < hi).all()
            assert held.unique().numel() == filled
            assert set(range(4)) <= set(held.tolist())
            expected = self.pools.k[layer][self.table[row, held].long(), head]
            torch.testing.assert_close(keys[:filled, head], expected)
