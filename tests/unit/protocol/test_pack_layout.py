# SPDX-License-Identifier: Apache-2.0
"""The parts of a pack neither overlap nor leave the buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.pack_layout import (
    PackHeader,
    PackLayout,
    read_header,
    write_header,
)

layouts = st.builds(
    PackLayout,
    num_layers=st.integers(1, 4),
    num_rows=st.integers(0, 5),
    num_kv_heads=st.integers(1, 3),
    fetch_cap=st.integers(1, 7),
    head_dim=st.sampled_from([1, 3, 8, 64]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    num_samples=st.sampled_from([0, 2, 6]),
)


@given(layouts)
@settings(max_examples=100, deadline=None)
def test_parts_are_aligned_disjoint_and_inside(layout: PackLayout) -> None:
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    base, end = buffer.data_ptr(), 0
    for part in layout.views(buffer):
        if not part.numel():
            continue
        start = part.data_ptr() - base
        assert start % 16 == 0
        assert start >= end
        assert part.is_contiguous()
        end = start + part.nbytes
    assert end <= layout.nbytes < end + 16
    entries = (layout.num_layers, layout.num_rows, layout.num_kv_heads, layout.fetch_cap)
    views = layout.views(buffer)
    assert views.fetch_pos.shape == views.fetch_slot.shape == entries
    assert views.k.shape == views.v.shape == (*entries, layout.head_dim)
    assert views.k.dtype == getattr(torch, layout.dtype)
    assert views.log_weight.shape == (*entries[:3], layout.num_samples)
    assert views.log_weight.dtype == torch.float32


@given(layouts, st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_after_a_copy(layout: PackLayout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(buffer)
    header = PackHeader(epoch=seed, step_id=1 << 50, seq=3)
    write_header(views, header)
    for part in views[1:]:
        part.copy_(torch.randint(-99, 99, part.shape, generator=generator))
    want = [part.clone() for part in views]
    got = layout.views(buffer.clone())
    assert read_header(got) == header
    for ours, theirs in zip(want, got, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("change", [-1, 1])
def test_buffer_of_another_size_is_refused(change: int) -> None:
    layout = PackLayout(
        num_layers=1, num_rows=1, num_kv_heads=1, fetch_cap=1, head_dim=8, dtype="float32"
    )
    with pytest.raises(ProtocolError, match="must be uint8"):
        layout.views(torch.zeros(layout.nbytes + change, dtype=torch.uint8))
    with pytest.raises(ProtocolError, match="must be uint8"):
        layout.views(torch.zeros(layout.nbytes, dtype=torch.int8))
    with pytest.raises(ProtocolError, match="not a pack"):
        read_header(layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8)))
