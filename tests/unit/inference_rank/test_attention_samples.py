# SPDX-License-Identifier: Apache-2.0
"""Samples of a decode step with the cache rank in the same process, where the pool is and not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, StepRow
from tandemkv.cache_rank.pump.near import read_again
from tandemkv.inference_rank.attention.resident_attention import (
    AttendTable,
    PagedResident,
    RingTable,
)
from tandemkv.inference_rank.attention.resident_home import OwnSet, ResidentHome
from tandemkv.inference_rank.attention.samples import OwnSamples, StepSamples, zeros_on
from tandemkv.kernels.samples import attend_samples, sample_offsets

CPU = torch.device("cpu")
ROWS1, CONTEXT, NUM_SLOTS, HEADS, DIM, RECENT, SINK, SAMPLES = 4, 120, 500, 2, 4, 8, 2, 6
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=1, num_qo_heads=4, num_kv_heads=HEADS, head_dim=DIM,
    hidden_size=8, max_context=CONTEXT, dtype="float32", model_hash="0",
)  # fmt: skip
SELECTION = SelectionSettings(
    budget_tokens=12, resident_factor=1.0, num_sink_tokens=SINK, num_recent_tokens=RECENT,
    sample_tokens=SAMPLES,
)  # fmt: skip
NUM_RESIDENT = SELECTION.num_resident
NUM_DENSE = DenseLengths.of(SELECTION, NUM_RESIDENT).num_dense


class Pool:
    """SGLang's pool, one layer: writes go to the step's slots."""

    def __init__(self) -> None:
        shape = (NUM_SLOTS + ROWS1 * NUM_RESIDENT, HEADS, DIM)
        self.k, self.v = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))

    def get_kv_buffer(self, _layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def set_kv_buffer(
        self, _layer: object, location: SimpleNamespace, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.k[location.loc], self.v[location.loc] = k, v


def make_home(pool: Pool, *, own: bool) -> ResidentHome:
    tables: dict[str, Any] = {
        "num_resident": NUM_RESIDENT, "num_recent": RECENT, "num_dense": NUM_DENSE,
        "max_batch": ROWS1 - 1, "device": CPU,
    }  # fmt: skip
    if own:
        return OwnSet(pool, RingTable(**tables), MODEL, SELECTION, zeros_on(CPU))
    tail = [x[NUM_SLOTS:].view(ROWS1, NUM_RESIDENT, HEADS, DIM) for x in (pool.k, pool.v)]
    return ResidentHome(
        pool,
        AttendTable(**tables, first_slot=NUM_SLOTS),
        [(tail[0], tail[1])],
        StepSamples(pool, MODEL, SELECTION, ROWS1 - 1, zeros_on(CPU)),
    )


@pytest.mark.parametrize("own", [False, True], ids=["pool", "own"])
@pytest.mark.parametrize("prompt", [1, 20, 50])
def test_a_request_attends_to_its_set_and_samples(own: bool, prompt: int) -> None:
    """The set holds the first R tokens; all others count by the samples, once it is sparse."""
    pool, row = Pool(), 2
    order = torch.randperm(NUM_SLOTS - 1, generator=torch.Generator().manual_seed(1)) + 1
    table = order[: ROWS1 * CONTEXT].view(ROWS1, CONTEXT).to(torch.int32)
    home = make_home(pool, own=own)
    attention = PagedResident(home.table, home.pool, home.samples)
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=4, tp_k_head_num=HEADS, head_dim=DIM, scaling=0.5
    )
    assert home.samples is not None
    home.fill(0, row, table[row, :prompt])
    generator = torch.Generator().manual_seed(5)
    if prompt > NUM_DENSE:
        first = table[row, :NUM_RESIDENT].long()
        home.sets[0][0][row, :NUM_RESIDENT] = pool.k[first]
        home.sets[0][1][row, :NUM_RESIDENT] = pool.v[first]
    for length in range(prompt + 1, CONTEXT):
        if length == NUM_DENSE + 1 and not own:  # as the cache rank does
            first = table[row, :NUM_RESIDENT].long()
            home.sets[0][0][row], home.sets[0][1][row] = pool.k[first], pool.v[first]
        end = length - RECENT
        offsets, spans = sample_offsets(torch.tensor(max(0, end - SINK)), SAMPLES)
        is_free = offsets + SINK >= NUM_RESIDENT
        count = torch.where(is_free, spans, 0).double()
        count *= (end - NUM_RESIDENT) / count.sum().clamp(min=1)
        is_sparse = length > NUM_DENSE
        log_weight = torch.where(is_free, count.log(), float("-inf")).float()
        # Row 0 is padding's; nobody else's weights may count either.
        home.samples.log_weight[0].fill_(9.0)
        home.samples.log_weight[0, row] = log_weight
        rows, lengths = torch.tensor([row, 0]), torch.tensor([length, 1])
        home.table.load(rows, lengths, table, NUM_DENSE)
        home.samples.load(rows, lengths, table, NUM_DENSE)
        q = torch.randn(2, 4 * DIM, generator=generator)
        k, v = torch.randn(2, 2, HEADS * DIM, generator=generator)
        batch = SimpleNamespace(
            out_cache_loc=torch.stack([table[row, length - 1].long(), torch.tensor(0)])
        )
        out = attention.attend(q, k, v, layer, batch, True, with_samples=True)
        weight = torch.ones(length, dtype=torch.float64)
        if is_sparse:
            weight[NUM_RESIDENT:end] = 0.0
            weight[offsets[is_free] + SINK] = count[is_free]
            assert abs(float(weight.sum()) - length) < 1e-6
        slots = table[row, :length].long()
        keys, values = (x[slots].double().repeat_interleave(2, 1) for x in (pool.k, pool.v))
        logits = torch.einsum("hd,nhd->hn", q[0].double().view(4, DIM), keys) * 0.5
        probs = (logits + weight.log()).softmax(-1)
        want = torch.einsum("hn,nhd->hd", probs, values).flatten()
        torch.testing.assert_close(out[0].double(), want, rtol=1e-4, atol=1e-5)
        plain = attention.attend(q, k, v, layer, batch, False, with_samples=False)
        assert torch.equal(plain[1], out[1]), "padding has no samples, whatever its weights say"
        if not is_sparse:
            assert torch.equal(plain, out)
        elif bool(is_free.any()):
            assert not torch.allclose(plain[0], out[0], atol=1e-3)


@pytest.mark.parametrize("prompt", [10, 19, 20, 21, 50])
def test_a_lost_step_is_undone_by_filling_again(prompt: int) -> None:
    """It has overwritten the oldest of the latest tokens, which might become a sample next."""
    pool, row, differed = Pool(), 2, 0
    order = torch.randperm(NUM_SLOTS - 1, generator=torch.Generator().manual_seed(1)) + 1
    table = order[: ROWS1 * CONTEXT].view(ROWS1, CONTEXT).to(torch.int32)
    home = make_home(pool, own=True)
    samples, sets = home.samples, home.sets[0]
    assert isinstance(samples, OwnSamples)
    layer = SimpleNamespace(layer_id=0)
    home.fill(0, row, table[row, :prompt])

    def step(length: int) -> None:
        rows, lengths = torch.tensor([row]), torch.tensor([length])
        home.table.load(rows, lengths, table, NUM_DENSE)
        assert home.samples is not None
        home.samples.load(rows, lengths, table, NUM_DENSE)
        token = torch.full((1, HEADS, DIM), float(length))
        location = SimpleNamespace(loc=table[row, length - 1 : length].long())
        home.pool.set_kv_buffer(layer, location, token, -token)

    for length in range(prompt, CONTEXT - 1):
        valid, _ = samples.positions(length)
        # While all fits token i is in slot i, and what is behind is nobody's.
        count = min(length, NUM_RESIDENT + RECENT)
        parts = [
            *((x[row], slice(count)) for x in sets),
            *((x[0, row], valid) for x in (samples.k, samples.v)),
        ]

        def held(parts: list[Any] = parts) -> list[torch.Tensor]:
            return [tensor[index].clone() for tensor, index in parts]

        before = held()
        step(length + 1)
        is_changed = not all(torch.equal(a, b) for a, b in zip(held(), before, strict=True))
        differed += is_changed
        home.fill(0, row, table[row, :length])
        after = held()
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), length
        step(length + 1)
    assert differed > CONTEXT - prompt - NUM_DENSE


@pytest.mark.gpu
def test_graphs_of_several_sizes_share_what_samples_work_in() -> None:
    """Attention to samples runs beside the other in each graph, and is done where it is merged."""
    torch.manual_seed(0)
    cuda, max_batch, num_layers = torch.device("cuda"), 8, 6
    model = msgspec.structs.replace(
        MODEL, num_layers=num_layers, num_qo_heads=8, head_dim=64, dtype="float32"
    )
    selection = SELECTION.model_copy(update={"sample_tokens": 256})
    k, v = torch.randn(2, 4096, HEADS, 64, device=cuda)
    pool = SimpleNamespace(get_kv_buffer=lambda _: (k, v))
    samples = StepSamples(pool, model, selection, max_batch, zeros_on(cuda))
    samples.log_weight.copy_(torch.randn(samples.log_weight.shape))
    rows = torch.arange(1, max_batch + 1, device=cuda)
    table = torch.randint(0, 4096, (max_batch + 1, 1024), device=cuda).int()
    samples.load(rows, torch.full_like(rows, 1000), table, 0)
    queries = torch.randn(num_layers, max_batch, 8, 64, device=cuda)
    begun = torch.randn(num_layers, max_batch, 8, 64, device=cuda)
    lse = torch.randn(max_batch, 8, device=cuda)
    graphs = {}
    for size in (max_batch, 3):
        out = torch.empty_like(begun[:, :size])

        def step(out: torch.Tensor = out, size: int = size) -> None:
            for layer in range(num_layers):
                query = queries[layer, :size]
                samples.begin(layer, query, scale=0.1)
                out[layer] = begun[layer, :size]  # stands for the other attention
                samples.attend(layer, query, out[layer], lse[:size], scale=0.1, lse_unit=1.0)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graphs[size] = graph, out
    want = begun.cpu().clone()
    for layer in range(num_layers):
        attend_samples(
            queries[layer].cpu(), k.cpu(), v.cpu(), samples._slots.cpu(), rows.cpu(),
            samples.log_weight[layer].cpu(), torch.ones(max_batch, dtype=torch.bool), want[layer],
            lse.cpu(), scale=0.1,
        )  # fmt: skip
    for _ in range(20):
        for size, (graph, out) in graphs.items():
            out.zero_()
            graph.replay()
            assert torch.allclose(out.cpu(), want[:, :size], atol=1e-4), size


@pytest.mark.parametrize("keeps_sink", [False, True])
@pytest.mark.parametrize("sample_tokens", [0, SAMPLES])
@pytest.mark.parametrize("dense_while_fits", [False, True])
def test_what_a_pump_fetches_for_a_request_that_is_taken_up_is_what_is_read(
    sample_tokens: int, *, dense_while_fits: bool, keeps_sink: bool
) -> None:
    selection = SELECTION.model_copy(
        update={"sample_tokens": sample_tokens, "dense_while_fits": dense_while_fits}
    )
    dense = DenseLengths.of(selection, NUM_RESIDENT)
    # A sink that no engine writes is the whole set.
    num_resident = SINK if keeps_sink else NUM_RESIDENT
    side: Any = SimpleNamespace(
        selection=selection, program=SimpleNamespace(num_layers=1, is_sparse_layer=lambda _: True)
    )
    for length in range(1, CONTEXT + 1):
        found = []
        flags = RESIDENT if length > dense.num_cold else 0
        slots = torch.arange(NUM_SLOTS - length, NUM_SLOTS, dtype=torch.int32)
        fetched = read_again(StepRow(row=1, generation=1, length=length, flags=flags), side)
        for is_all_here in (True, False):
            pool = Pool()
            if not is_all_here:
                is_missing = torch.ones(len(pool.k), dtype=torch.bool)
                is_missing[slots[fetched].long()] = False
                pool.k[is_missing] = pool.v[is_missing] = torch.nan
            table = RingTable(
                num_resident=NUM_RESIDENT, num_recent=RECENT, num_dense=dense.num_dense,
                max_batch=ROWS1 - 1, device=CPU,
            )  # fmt: skip
            home = OwnSet(pool, table, MODEL, selection, zeros_on(CPU), keeps_sink=keeps_sink)
            home._num_sink = num_resident if keeps_sink else 0
            home.fill(0, 1, slots)
            own = [] if home.samples is None else [home.samples.k, home.samples.v]
            found.append(torch.cat([x.flatten() for x in (*home.sets[0], *own)]))
        assert torch.equal(*found)
        assert len(fetched) <= max(dense.num_cold, SINK + RECENT + sample_tokens)
        unfinished = read_again(StepRow(row=1, generation=1, length=length), side)
        assert len(unfinished) == (length if length <= dense.num_cold else 0)
    side.program.is_sparse_layer = lambda _: False
    assert not len(read_again(StepRow(row=1, generation=1, length=1), side))
