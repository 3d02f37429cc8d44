# SPDX-License-Identifier: Apache-2.0
"""What a scan waits for, in the order in which a cache rank queues it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.in_process import rank as rank_module
from tandemkv.cache_rank.in_process.factory import create
from tandemkv.cache_rank.in_process.rank import InProcessCacheRank
from tandemkv.cache_rank.in_process.scan_order import ScanOrder
from tandemkv.cache_rank.protocol.local import LocalPools
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.kernels.select import score_topk

LAYERS, HEADS, DIM, CONTEXT = 6, 2, 16, 256
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=LAYERS, num_qo_heads=HEADS, num_kv_heads=HEADS,
    head_dim=DIM, hidden_size=HEADS * DIM, max_context=CONTEXT, dtype="float32", model_hash="0",
)  # fmt: skip


def make_rank(**selection: object) -> InProcessCacheRank:
    """Of one request, whose queries are the hidden state itself."""
    chosen = {
        "policy": "look_ahead", "budget_tokens": 32, "resident_factor": 1.5, "num_sink_tokens": 4,
        "num_recent_tokens": 16, "fetch_cap": 8, "exact_layers": (0,), **selection,
    }  # fmt: skip
    settings = RankSettings.model_validate(
        {"selection": chosen, "exchange": {"transport": "local"}}
    )
    shape = (2, settings.selection.num_resident, HEADS, DIM)
    pools = [torch.randn(CONTEXT, HEADS, DIM) for _ in range(2 * LAYERS)]
    return create(
        model=MODEL,
        settings=settings,
        pools=LocalPools(
            k=pools[:LAYERS],
            v=pools[LAYERS:],
            resident=[(torch.zeros(shape), torch.zeros(shape)) for _ in range(LAYERS)],
            page_size=16,
            log_weight=None,
        ),
        max_batch=1,
        predict_query=lambda _layer, hidden, _positions: hidden.view(-1, HEADS, DIM),
        model_dir=None,
    )


def decode(rank: InProcessCacheRank) -> None:
    """Select once for each layer."""
    table = torch.arange(CONTEXT, dtype=torch.int32).expand(2, -1)
    rank.begin_step()
    rank.begin_decode(torch.tensor([1]), torch.tensor([200]), table)
    hidden = torch.randn(1, HEADS * DIM)
    for layer in range(LAYERS):
        for scanned in rank.scans_of(layer):
            rank.scan_ahead(scanned, hidden)
        for target in rank.targets_of(layer):
            rank.choose_ahead(target, hidden)
            rank.fetch(target, 1)


@pytest.mark.parametrize("pool_before", [0, 1])
def test_a_scan_waits_for_the_choice_before_it(
    pool_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the whole selection: `score_topk` says when, and queues before what need not wait."""
    order: list[str] = []

    def choose(*arguments: Any, before_scan: Callable[[], None], **options: Any) -> Any:
        order.append("choose")
        return score_topk(*arguments, before_scan=before_scan, **options)

    monkeypatch.setattr(rank_module, "score_topk", choose)
    monkeypatch.setattr(ScanOrder, "await_choice", lambda _: order.append("await"))
    monkeypatch.setattr(ScanOrder, "note_choice", lambda _: order.append("note"))
    decode(make_rank(pool_before=pool_before))
    assert order == ["choose", "await", "note"] * (LAYERS - 1)


def test_a_scan_ahead_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(ScanOrder, "await_choice", lambda _: order.append("await"))
    rank = make_rank(scan_ahead=True)
    decode(rank)
    ahead = [x for layer in range(LAYERS) for x in rank.scans_of(layer)]
    assert ahead
    assert len(order) == LAYERS - 1 - len(ahead)
