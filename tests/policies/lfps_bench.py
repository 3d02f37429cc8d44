# SPDX-License-Identifier: Apache-2.0
"""The policy `lfps` for one request in one layer, and references of it."""

from __future__ import annotations

import torch
from lfps_reference import Reference

from tandemkv.cache_rank.policies.attending import AttendInput
from tandemkv.cache_rank.policies.base import PolicyContext, SeedInput, StoredKV
from tandemkv.cache_rank.policies.registry import find_policy, resolve_selection
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec


class Bench:
    """One request in one layer: K, V, queries and the policy."""

    def __init__(
        self, *, heads=2, group=2, dim=16, positions=400, seed=0, options=None, **selection
    ):
        values = {
            "policy": "lfps",
            "budget_tokens": 24,
            "num_sink_tokens": 2,
            "num_recent_tokens": 8,
            "options": {"rows": 4} | (options or {}),
        } | selection
        dtype = values.pop("dtype", "float32")
        self.selection = resolve_selection(values)
        self.model = ModelSpec(
            architecture="LlamaForCausalLM",
            num_layers=1,
            num_qo_heads=heads * group,
            num_kv_heads=heads,
            head_dim=dim,
            hidden_size=heads * group * dim,
            max_context=positions,
            dtype=dtype,
            model_hash="tiny",
        )
        self.policy = find_policy("lfps")(PolicyContext(model=self.model, selection=self.selection))
        self.options = self.policy.options
        generator = torch.Generator().manual_seed(seed)
        self.k = torch.randn(positions, heads, dim, generator=generator)
        self.v = torch.randn(positions, heads, dim, generator=generator)
        self.q = torch.randn(positions, heads * group, dim, generator=generator) * 1.5
        self.slots = torch.randperm(positions, generator=generator).to(torch.int32)
        self.owner = (1, 1)

    def table(self, name, n):
        """Return ``[H, n]``: ``vertical`` by candidate, ``slash`` by distance."""
        tables, unit = self.state.arrays[0], self.state.arrays[3]
        return tables[("vertical", "slash").index(name), :, :n].astype(float) * unit[:, None]

    def stored(self):
        """K and V at their slots."""
        dtype = getattr(torch, self.model.dtype)
        pools = []
        for by_position in (self.k, self.v):
            pool = torch.full_like(by_position, float("nan"))
            pool[self.slots.long()] = by_position
            pools.append(pool.to(dtype))
        return StoredKV(*pools, self.slots[None])

    def start(self, length, window=None):
        window = window or self.options.rows
        positions = torch.arange(length - window, length)
        self.policy.observe_stored(
            SeedInput(
                layer=0,
                owner=self.owner,
                queries=self.q[positions],
                positions=positions,
                score=lambda queries, at: queries,
                lo=self.selection.num_sink_tokens,
                hi=length + 1 - self.selection.num_recent_tokens,
                stored=self.stored(),
                budget=self.selection.budget_tokens,
            )
        )

    def step(self, position, stored=None):
        """Decode the token at `position`."""
        hi = position + 1 - self.selection.num_recent_tokens
        return self.policy.attend(
            AttendInput(
                layer=0,
                owners=[self.owner],
                query=self.q[position][None],
                lengths=torch.tensor([position + 1]),
                lo=torch.tensor([self.selection.num_sink_tokens]),
                hi=torch.tensor([hi]),
                stored=stored or self.stored(),
                budget=self.selection.budget_tokens,
            )
        )

    @property
    def state(self):
        return self.policy._states[self.owner][0]

    def references(self):
        """One reference per KV head."""
        selection = self.selection
        return [
            Reference(
                self.k[:, head].double().numpy(),
                self.v[:, head].double().numpy(),
                lo=selection.num_sink_tokens,
                num_recent=selection.num_recent_tokens,
                budget=selection.budget_tokens,
                a=self.options.threshold,
                decay=self.options.decay,
                epsilon=self.options.sparsity,
            )
            for head in range(self.model.num_kv_heads)
        ]

    def group(self, head, position):
        size = self.model.gqa_group_size
        return self.q[position, head * size : (head + 1) * size].double().numpy()
