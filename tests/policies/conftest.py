# SPDX-License-Identifier: Apache-2.0
"""A little layer of keys to select from, without a service around it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds_by_page import page_bounds

from tandemkv.cache_rank.calibration.resolve import share_of
from tandemkv.cache_rank.policies.base import (
    HeadClusters,
    Policy,
    PolicyContext,
    Rotary,
    SelectionInput,
    StoredKV,
)
from tandemkv.cache_rank.policies.registry import find_policy, resolve_selection
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.kernels.score import KeyScan, score_keys

_SPEC = importlib.util.spec_from_file_location("policy_cases", Path(__file__).parent / "cases.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_CASES)

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=3,
    num_qo_heads=6,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=48,
    max_context=256,
    dtype="float32",
    model_hash="0" * 32,
)
ROTARY = Rotary(1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8))


def make_context(**changes: Any) -> PolicyContext:
    values = {"budget_tokens": 24, "num_sink_tokens": 4, "num_recent_tokens": 8} | changes
    selection = resolve_selection(values)
    heads = tuple(range(MODEL.num_kv_heads))
    return PolicyContext(
        model=MODEL,
        selection=selection,
        rotary=ROTARY,
        share=share_of(selection.anchors, (heads,) * 3) if selection.anchors else None,
        clusters=HeadClusters((heads,) * 3, (heads,) * 3),  # each head looks for itself
    )


@dataclass
class Bench:
    """Keys of two requests in one layer, and a policy."""

    policy: Policy
    context: PolicyContext
    lengths: tuple[int, ...]
    k: torch.Tensor
    slots: torch.Tensor

    def request(self, query: torch.Tensor, layer: int = 1) -> SelectionInput:
        selection = self.context.selection
        lengths = torch.tensor(self.lengths)
        hi = (lengths - selection.num_recent_tokens).clamp(min=0)
        return SelectionInput(
            layer=layer,
            owners=[(row + 1, 1) for row in range(len(self.lengths))],
            rows=torch.arange(1, len(self.lengths) + 1),
            query=query,
            positions=lengths - 1,
            use_positions=lengths,
            score=lambda asked: score_keys(
                KeyScan(
                    asked,
                    self.k,
                    self.slots,
                    torch.full_like(hi, selection.num_sink_tokens),
                    hi,
                    width=int(hi.max()),
                    scale=MODEL.scale,
                    pooling=selection.pooling,
                )
            ),
            budget=selection.budget_tokens,
            lo=torch.full_like(hi, selection.num_sink_tokens),
            hi=hi,
            stored=StoredKV(self.k, self.k, self.slots),
            pages=page_bounds(
                self.k,
                self.slots,
                torch.arange(1, len(self.lengths) + 1),
                torch.full_like(hi, selection.num_sink_tokens),
                hi,
                page_tokens=self.policy.page_tokens,
            ),
        )

    def select(self, queries: list[torch.Tensor], layer: int = 1) -> torch.Tensor:
        """Select with the last of `queries` [S, Hq, D], having seen them all."""
        request = self.request(queries[-1], layer)
        if self.policy.capabilities.wants_query_window:
            for i, query in enumerate(queries):
                at = request.positions - (len(queries) - 1 - i)
                self.policy.observe(layer, request.owners, query, at)
        selection = self.policy.select(request)
        shape = (len(self.lengths), MODEL.num_kv_heads, request.budget)
        selection.check(shape)
        return selection.positions


@pytest.fixture
def make_bench():
    def make(name: str, *, lengths: tuple[int, ...] = (70, 100), **changes: Any) -> Bench:
        generator = torch.Generator().manual_seed(3)
        context = make_context(policy=name, **changes)
        k = torch.randn(256, 2, 8, generator=generator)
        slots = torch.stack(
            [torch.randperm(256, generator=generator)[: max(lengths)] for _ in lengths]
        ).to(torch.int32)
        policy = find_policy(name)(context)
        policy.make_rows(lambda _, shape, dtype: torch.zeros(shape, dtype=dtype), 1 + len(lengths))
        return Bench(policy, context, lengths, k, slots)

    return make


@pytest.fixture
def queries():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, 6, 8, generator=generator) for _ in range(20)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = _CASES.POLICY_CASES
        ids = [
            "-".join([name, *(f"{k}={v}" for k, v in changes.items())]) for name, changes in cases
        ]
        metafunc.parametrize("case", cases, ids=ids)
    if "unselective" in metafunc.fixturenames:
        metafunc.parametrize("unselective", _CASES.UNSELECTIVE)
