# SPDX-License-Identifier: Apache-2.0
"""The resident set: where tokens sit, what is visible, and that nothing is there twice."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import SelectionSettings
from tandemkv.inference_rank.resident_set import ResidentSet

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=1,
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim=2,
    hidden_size=4,
    max_context=256,
    dtype="float32",
    model_hash="x",
)


def make(*, sink: int, budget: int, ring: int, dense: bool = True) -> ResidentSet:
    selection = SelectionSettings.model_construct(
        policy="look_ahead",
        num_sink_tokens=sink,
        budget_tokens=budget,
        resident_factor=1.0,
        num_recent_tokens=ring,
        dense_while_fits=dense,
    )
    return ResidentSet(MODEL, selection, max_rows=2, device=torch.device("cpu"))


def token(position: int) -> torch.Tensor:
    """A K row that tells its position."""
    return torch.full((1, 1, 2), float(position + 1))


def visible_positions(resident: ResidentSet, row: int, length: int) -> list[int]:
    mask = resident.visible([length])[0]
    return [int(x) - 1 for x in resident.k[0, row, mask, 0, 0].tolist()]


@given(
    sink=st.integers(0, 3),
    budget=st.integers(1, 9),
    ring=st.integers(2, 7),
    prompt=st.integers(1, 30),
    steps=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_dense_rows_hold_every_token_and_sparse_rows_the_latest(
    sink: int, budget: int, ring: int, prompt: int, steps: int
) -> None:
    resident = make(sink=sink, budget=budget, ring=ring)
    k = torch.cat([token(p) for p in range(prompt)])
    resident.fill_from_prompt(0, 1, k, k)
    for length in range(prompt + 1, prompt + steps + 1):
        slot = torch.tensor([resident.write_slot(length)])
        new = token(length - 1)
        resident.append(0, torch.tensor([1]), slot, new, new)
        held = visible_positions(resident, 1, length)
        assert len(held) == len(set(held)), "a token is resident twice"
        latest = set(range(max(0, length - ring), length))
        assert latest <= set(held)
        if resident.is_dense(length):
            assert set(held) == set(range(length))
        else:
            assert len(held) == min(resident.num_slots, length)


@given(ring=st.integers(2, 7), budget=st.integers(1, 9), length=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_ring_only_view_is_the_latest_tokens(ring: int, budget: int, length: int) -> None:
    resident = make(sink=0, budget=budget, ring=ring, dense=False)
    k = torch.cat([token(p) for p in range(length)])
    resident.fill_from_prompt(0, 1, k, k)
    mask = resident.visible_ring([length])[0]
    held = sorted(int(x) - 1 for x in resident.k[0, 1, mask, 0, 0].tolist())
    assert held == list(range(max(0, length - ring), length))


def test_seed_puts_each_head_its_own_tokens() -> None:
    model = msgspec.structs.replace(MODEL, num_kv_heads=2)
    selection = SelectionSettings.model_construct(
        policy="look_ahead",
        num_sink_tokens=1,
        budget_tokens=2,
        resident_factor=1.0,
        num_recent_tokens=2,
        dense_while_fits=True,
    )
    resident = ResidentSet(model, selection, max_rows=1, device=torch.device("cpu"))
    k = torch.arange(10.0).view(10, 1, 1).expand(10, 2, 2).contiguous()
    positions = torch.tensor([[0, 5, 3], [0, 7, 2]], dtype=torch.int32)
    resident.seed(0, 1, positions, k, -k)
    assert resident.k[0, 1, :3, 0, 0].tolist() == [0.0, 5.0, 3.0]
    assert resident.k[0, 1, :3, 1, 0].tolist() == [0.0, 7.0, 2.0]
    assert resident.v[0, 1, :3, 1, 0].tolist() == [0.0, -7.0, -2.0]


@pytest.mark.parametrize("length", [1, 100, 100_000])
def test_size_does_not_depend_on_context(length: int) -> None:
    resident = make(sink=1, budget=4, ring=3)
    assert resident.k.shape[2] == 1 + 4 + 3
    assert resident.write_slot(length) < resident.num_slots
