# SPDX-License-Identifier: Apache-2.0
"""What is too long for a message between two hosts, such as a large resident set, is cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from two_hosts import DECODE, EXTEND, MODEL, SELECTING, WAYS, End, Queue, Way, settings_of

from tandemkv.cache_rank.protocol.engine_program import EngineProgram
from tandemkv.cache_rank.protocol.message.data_plane import MAX_BODY_BYTES
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.pump import contents
from tandemkv.cache_rank.pump import side as side_module
from tandemkv.cache_rank.pump.contents import Contents
from tandemkv.cache_rank.pump.plan import Flag, FlagKind
from tandemkv.cache_rank.pump.records import Outbox, read_records


@WAYS
@pytest.mark.parametrize("piece", [64, 512])
def test_what_is_too_long_for_a_message_comes_back_in_pieces(
    way: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set, what one request changes of it, and weights of samples."""
    monkeypatch.setattr(contents, "PIECE_BYTES", piece)
    link = Way(way, "oracle", is_back=True)
    source, target = link.source, link.target
    link.carry(EXTEND)
    sparse = [x for x in range(MODEL.num_layers) if source.program.is_sparse_layer(x)]
    sets = list(zip(source.side.resident, target.side.resident, strict=True))
    for ours, theirs in sets:
        assert torch.equal(ours[sparse, 3], theirs[sparse, 3])
        ours.normal_()
    want = [theirs.clone() for _, theirs in sets]
    for layer in source.program.selecting:
        for head, slot in ((0, 1), (0, 4), (0, 5), (1, 2)):
            source.positions[source.program.book_of(layer), 3, head, slot] += 1
            for (ours, _), out in zip(sets, want, strict=True):
                out[layer, 3, slot, head] = ours[layer, 3, slot, head]
    source.side.log_weight.normal_()
    link.carry(replace(DECODE, step=8))
    assert all(torch.equal(x, theirs) for x, (_, theirs) in zip(want, sets, strict=True))
    weights = [end.side.log_weight[source.program.selecting, 3] for end in (source, target)]
    assert torch.equal(*weights)
    assert link.is_raised(Flag(FlagKind.FINISHED), 8)


def test_a_set_that_is_sent_beside_a_step_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, wire = End("oracle", has_all=True), End("oracle", has_all=False), Queue()
    piece_bytes = 5 * 2 * source.side.resident[0][0, 0, :1].nbytes + 8
    monkeypatch.setattr(side_module, "PIECE_BYTES", piece_bytes)
    out = Outbox(wire)  # type: ignore[arg-type]
    for row in (3, 1):
        source.side.put_set(out, 4, row)
    out.flush()
    found = [record for body in wire.bodies for record in read_records(body)]
    width = source.side.resident[0].shape[2]
    assert len(found) == 2 * -(-width // 5)
    assert all(len(record.content) <= piece_bytes for record in found)
    for record in found:
        target.side.write_set(record)
    for ours, theirs in zip(source.side.resident, target.side.resident, strict=True):
        assert torch.equal(theirs[4, [1, 3]], ours[4, [1, 3]])
        assert theirs.count_nonzero() == ours[4, [1, 3]].count_nonzero()


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("budget", [16384, 65536])
def test_no_message_is_longer_than_a_host_takes(heads: int, budget: int) -> None:
    """With the largest settings; no memory is behind the tensors."""
    side = _largest(heads, budget)
    found = Contents(side)
    rows = [
        StepRow(row=row, generation=1, length=9000, prefix_len=8000, window=1000)
        for row in range(1, side.table.shape[0])
    ]
    for entry in (
        StepEntry(kind=EntryKind.EXTEND, step=1, rows=rows[:1]),
        StepEntry(kind=EntryKind.GROW, step=2, rows=rows),
        StepEntry(kind=EntryKind.DECODE, step=3, variant=SELECTING, rows=rows[:1]),
    ):
        found._entry = entry
        for message in (*found.plan.outward(entry), *found.plan.back(entry)):
            _, nbytes = found._layout(message, side.most_changes)
            head = 1 << 10  # of the record that it is
            assert nbytes + head <= MAX_BODY_BYTES, message


def _largest(heads: int, budget: int) -> Any:
    """Return a side of 1024 requests, whose selections are as large as settings may be."""
    model = msgspec.structs.replace(
        MODEL, num_layers=2, num_qo_heads=heads, num_kv_heads=heads, head_dim=256, hidden_size=8192,
        max_context=40960,
    )  # fmt: skip
    selection = {
        "policy": "oracle", "budget_tokens": budget, "resident_factor": 16.0, "fetch_cap": 65536,
        "num_sink_tokens": 1024, "num_recent_tokens": 1024, "sample_tokens": 1024,
        "exact_layers": [],
    }  # fmt: skip
    settings = settings_of(selection)
    found, stored = settings.selection, (heads, model.head_dim)
    sets = torch.empty(2, 1025, found.num_resident, *stored, device="meta")
    batch = 1024, *stored
    tensors = {
        "seed_queries": torch.empty(2, 8192, *stored, device="meta"),
        "queries": torch.empty(2, *batch, device="meta"),
        "streams": torch.empty(2, 1024, model.hidden_size, device="meta"),
        "outputs": torch.empty(1024, heads, model.head_dim + 1, device="meta"),
        "remote_outputs": torch.empty(batch, device="meta"),
    }
    return SimpleNamespace(
        program=EngineProgram(model, settings, page_size=1), on_gpu=False, requests=None,
        kv=torch.empty(2, 2, 65537, *stored, device="meta"), resident=(sets, sets),
        log_weight=torch.empty(2, 1025, heads, found.num_samples, device="meta"),
        has_samples=True, most_changes=found.fetch_cap_tokens, tensors=tensors,
        table=torch.empty(1025, model.max_context, dtype=torch.int32, device="meta"),
    )  # fmt: skip
