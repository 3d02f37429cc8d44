# SPDX-License-Identifier: Apache-2.0
"""The whole service, driven by a scripted inference rank over a data plane in memory.

The scripted rank (conftest) checks every restore, every exact output and, after each pack,
what is resident; the tests say what happens, and check the counters.
"""

import random

import msgspec
import pytest
import torch

from tandemkv.cache_rank.model_adapters.llama import LlamaAdapter
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.ipc import IpcDealer
from tandemkv.cache_rank.protocol.messages import (
    ClearSlots,
    FreeSlots,
    Goodbye,
    Heartbeat,
    RowFlag,
    RowStep,
    StepBegin,
    StepKind,
    Timing,
)

NEXT_STEP = ("async_spade", "last_query", "mean_query")
SELECTING = ("look_ahead", "oracle", *NEXT_STEP)


@pytest.mark.parametrize("policy", SELECTING)
def test_sparse_rows_keep_their_invariants(serve, settings_of, policy):
    served = serve(settings_of(policy=policy))
    rank = served.connect()
    long, short = rank.new_request(1, 120), rank.new_request(3, 20)
    rank.extend(long, short)
    for _ in range(30):  # `short` turns from dense to sparse on the way
        rank.decode(long, short)
    reply = rank.settle()
    values = served.counters
    assert values.stale_reads_total == values.protocol_errors_total == 0
    assert values.selections_total > 0
    assert values.fetched_rows_total == rank.num_fetched > 0
    assert values.resident_hits_total + values.resident_misses_total == values.selected_tokens_total
    assert values.withheld_packs_total == 0
    assert values.rows_live == 2
    assert values.slots_live == len(long.slots) + len(short.slots)
    assert values.bytes_sent_total == rank.transport.bytes_received
    assert reply.values["staleness_steps"] == (1 if policy in NEXT_STEP else 0)
    assert reply.info["policy"] == policy


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "kascade"},
        {"policy": "look_ahead", "share_layers": True},
        {"policy": "last_query", "share_layers": True},
    ],
)
def test_reuse_layers_hold_their_anchors_tokens(serve, settings_of, changes):
    """Layers 2 and on follow 1, and with R = sink + K and no cap hold what it selected."""
    sharing = {"anchors": (0, 1), "exact_layers": (0,), "resident_factor": 1.0}
    settings = settings_of(**(changes | sharing))
    budget = settings.selection.budget_tokens
    served = serve(settings_of(**(changes | sharing | {"fetch_cap": budget})))
    rank = served.connect()
    assert rank.welcome.traits.layer_sources[:3] == (0, 1, 1)
    request = rank.new_request(1, 120)
    rank.extend(request)
    for _ in range(10):
        rank.decode(request)
    rank.settle()
    held = rank.positions[:, 1].sort(dim=-1).values
    for layer in range(2, rank.model.num_layers):
        assert torch.equal(held[layer], held[1])
    assert served.counters.protocol_errors_total == served.counters.stale_reads_total == 0


@pytest.mark.parametrize("policy", SELECTING)
def test_what_fits_is_resident_when_it_goes_through_selection(serve, settings_of, policy):
    served = serve(settings_of(policy=policy, dense_while_fits=False))
    rank = served.connect()
    request = rank.new_request(2, 5)
    rank.extend(request)
    for _ in range(20):  # from fewer tokens than the ring on; checked after each pack
        rank.decode(request)
    rank.settle()
    assert served.counters.selections_total > 0
    assert served.counters.evictions_total == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"index_dtype": "int8"},
        {"refresh_every": 3},
        {"num_sink_tokens": 0},
        {"exact_layers": (0, 1, 2, 3)},
        {"exact_layers": ()},
        {"fetch_cap": 64},
        {"pooling": "max_logit"},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["look_ahead", "async_spade"])
def test_options(serve, settings_of, policy, changes):
    served = serve(settings_of(policy=policy, **changes))
    rank = served.connect()
    request = rank.new_request(1, 90)
    rank.extend(request)
    for _ in range(12):
        rank.decode(request)
    rank.settle()
    values = served.counters
    assert values.protocol_errors_total == values.withheld_packs_total == 0
    # Exact layers only is exact attention: nothing is left to select.
    assert (values.selections_total > 0) == (len(changes.get("exact_layers", ())) != 4)


@pytest.mark.parametrize("look_ahead_layers", [0, 1, 2])
def test_look_ahead_fetches_the_best_by_the_predicted_query(
    serve, settings_of, tiny_model_dir, look_ahead_layers
):
    settings = settings_of(fetch_cap=32, exact_layers=(), options={"distance": look_ahead_layers})
    served = serve(settings)
    rank = served.connect()
    request = rank.new_request(1, 100)
    rank.extend(request)
    rank.decode(request)
    rank.settle()
    adapter = LlamaAdapter(tiny_model_dir, served.model, layers=range(4))
    length = len(request.slots)
    for layer in range(4):
        source = max(0, layer - look_ahead_layers)
        hidden, position = rank.hidden[source], torch.tensor([length - 1])
        query = adapter.predict_query(layer, hidden, position)[0].double()
        k = request.k[layer, 2 : length - 8].double().repeat_interleave(2, 1)
        probs = torch.softmax(torch.einsum("hd,nhd->hn", query, k) * served.model.scale, -1)
        best = probs.view(2, 2, -1).mean(1).topk(16).indices + 2
        for head in range(2):
            resident = set(rank.positions[layer, 1, head].tolist())
            assert set(best[head].tolist()) <= resident


@pytest.mark.parametrize("policy", [*SELECTING, "exact"])
def test_bfloat16(serve, settings_of, policy):
    served = serve(settings_of(policy=policy))
    served.model = msgspec.structs.replace(served.model, dtype="bfloat16")
    rank = served.connect()
    request = rank.new_request(1, 80)
    rank.extend(request, upto=50)
    rank.extend(request)
    for _ in range(3):
        rank.decode(request, padding=1)
    assert rank.settle().epoch == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["look_ahead", "async_spade"])
def test_random_traffic(serve, settings_of, policy, seed):
    """Requests come, grow, are remapped, end; slots are freed, poisoned and used again."""
    served = serve(settings_of(policy=policy))
    rank = served.connect()
    rng, live, generation = random.Random(seed), {}, 0
    for _ in range(60):
        free_rows = [row for row in range(1, 5) if row not in live]
        action = rng.random()
        if free_rows and (action < 0.2 or not live):
            generation += 1
            request = rank.new_request(rng.choice(free_rows), rng.randint(5, 90), generation)
            length = len(request.slots)
            if rng.random() < 0.4:
                rank.extend(request, upto=rng.randint(1, length))
            if request.stored < length:
                rank.extend(request)
            else:
                request.stored = length - 1  # as after a full radix hit: one token again
                rank.extend(request)
            live[request.row] = request
        elif live and action < 0.3:
            request = live.pop(rng.choice(list(live)))
            rank.release(request)
            rank.free(request.slots)
            rank.free_slots += request.slots.tolist()
        else:
            chosen = rng.sample(list(live.values()), rng.randint(1, len(live)))
            chosen.sort(key=lambda request: request.row)
            dirty = tuple(request for request in live.values() if rng.random() < 0.1)
            rank.decode(*chosen, dirty=dirty, padding=rng.randint(0, 1))
    assert rank.settle().epoch == 1
    values = served.counters
    assert values.stale_reads_total == values.old_epoch_total == 0
    assert values.rows_live == len(live)
    assert values.slots_live == sum(len(request.slots) for request in live.values())


def test_seed_is_the_sink_and_the_best_of_the_window(serve, settings_of):
    served = serve(settings_of(exact_layers=()))
    rank = served.connect()
    request = rank.new_request(4, 70)
    rank.extend(request)
    hi = 70 + 1 - 8
    for layer in range(4):
        k = request.k[layer, 2:hi].double().repeat_interleave(2, 1)
        logits = torch.einsum("qhd,nhd->qhn", rank.queries[layer].double(), k)
        logits *= served.model.scale
        positions = torch.arange(2, hi)
        hidden = positions > torch.arange(64, 70)[:, None]
        logits.masked_fill_(hidden[:, None], float("-inf"))
        scores = torch.softmax(logits, -1).mean(0).view(2, 2, -1).mean(1)
        best = scores.topk(32).indices + 2
        seeds = rank.positions[layer, 4]
        assert seeds[:, :2].tolist() == [[0, 1]] * 2
        assert torch.equal(seeds[:, 2:].long(), best)


def test_the_worst_of_the_seed_is_replaced_first(serve, settings_of):
    served = serve(settings_of(policy="oracle", exact_layers=(), fetch_cap=1))
    rank = served.connect()
    request = rank.new_request(1, 100)
    rank.extend(request)
    seeds = rank.positions.clone()
    rank.decode(request)
    changed = rank.positions[:, 1] != seeds[:, 1]
    assert changed.any()
    for layer, head, slot in changed.nonzero().tolist():
        later = seeds[layer, 1, head, slot + 1 :]
        # Whatever was seeded behind the replaced one was selected in this step, hence kept.
        k = request.k[layer, 2 : len(request.slots) - 8, head]
        query = rank.queries[layer][0, 2 * head : 2 * head + 2]
        probs = torch.softmax(query @ k.T * served.model.scale, -1).mean(0)
        assert set(later.tolist()) <= set((probs.topk(16).indices + 2).tolist())


def test_chunked_prefill_and_radix_hit_restore_the_prefix(serve):
    served = serve()
    rank = served.connect()
    first = rank.new_request(1, 90)
    rank.extend(first, upto=40)
    rank.extend(first, upto=64)
    rank.extend(first)
    second = rank.new_request(2, 100)
    second.k[:, :50], second.v[:, :50] = first.k[:, :50], first.v[:, :50]
    second.slots[:50] = first.slots[:50]
    second.stored = 50  # the scripted rank compares what comes back bit by bit
    rank.extend(second)
    rank.decode(first, second)
    rank.settle()
    assert served.counters.stale_reads_total == 0
    assert served.counters.seeds_total == 2


@pytest.mark.parametrize("policy", ["exact", "streaming", "look_ahead", "async_spade"])
def test_exact_rows_and_padding(serve, settings_of, policy):
    served = serve(settings_of(policy=policy))
    rank = served.connect()
    request = rank.new_request(1, 80)
    rank.extend(request)
    for _ in range(3):
        rank.decode(request, exact=policy != "streaming", padding=2)
    rank.settle()
    num_layers = 1 if policy == "streaming" else 4
    assert served.counters.exact_rows_total == 3 * num_layers
    assert served.counters.selections_total == 0
    assert served.counters.protocol_errors_total == 0
    assert rank.welcome.all_exact == (policy == "exact")
    timing = {"look_ahead": Timing.SAME_STEP_HIDDEN, "async_spade": Timing.NEXT_STEP}
    assert rank.welcome.timing == timing.get(policy, Timing.NONE)


def test_padding_rows_beside_sparse_ones(serve, settings_of):
    for policy in SELECTING:
        served = serve(settings_of(policy=policy))
        rank = served.connect()
        request = rank.new_request(1, 80)
        rank.extend(request)
        rank.decode(request, padding=3)
        rank.decode(request)
        assert rank.settle().values["protocol_errors_total"] == 0


def test_a_remapped_row_reads_its_new_slots(serve, settings_of):
    served = serve(settings_of(policy="oracle"))
    rank = served.connect()
    first, second = rank.new_request(1, 60), rank.new_request(2, 80)
    second.k[:, :30], second.v[:, :30] = first.k[:, :30], first.v[:, :30]
    rank.extend(first, second)
    rank.decode(first, second)
    old = second.slots[:30].clone()
    second.slots[:30] = first.slots[:30]
    rank.decode(first, second, dirty=(second,))
    rank.free(old)  # poisoned: whoever still read them would get NaN
    for _ in range(5):
        rank.decode(first, second)
    rank.decode(first, dirty=(second,))  # dirty, but not in the step
    rank.settle()
    assert served.counters.stale_reads_total == 0
    assert served.counters.protocol_errors_total == 0


def test_free_is_a_hint(serve):
    served = serve()
    rank = served.connect()
    first = rank.new_request(1, 60)
    rank.extend(first)
    rank.settle()
    assert served.counters.slots_live == 60
    rank.release(first)
    rank.free(first.slots)
    rank.settle()
    assert served.counters.slots_live == served.counters.rows_live == 0
    assert served.service._resources._store.k[2][int(first.slots[0])].isnan().all()
    second = rank.new_request(1, 60, generation=2)
    second.slots = first.slots.flip(0)  # a put after a free
    rank.extend(second)
    rank.decode(second)
    rank.settle()
    assert served.counters.slots_live == 61
    assert served.counters.stale_reads_total == 0
    rank.free(second.slots[:4])
    rank.free(second.slots[:4])  # twice is no harm
    rank.settle()
    assert served.counters.slots_live == 57
    rank.control.send(ClearSlots(epoch=rank.welcome.epoch))
    rank.settle()
    assert served.counters.slots_live == 0


def test_a_stale_read_is_counted(serve):
    served = serve()
    rank = served.connect()
    request = rank.new_request(1, 60)
    rank.extend(request)
    rank.free(request.slots[:3])
    with pytest.raises(AssertionError):  # NaN, as poisoned
        rank.decode(request)
    served.wait_for(lambda: served.counters.stale_reads_total >= 3)


def test_packs_are_withheld_until_they_are_acknowledged(serve, settings_of):
    served = serve(settings_of(policy="oracle", sample_tokens=4))
    rank = served.connect()
    request = rank.new_request(1, 100)
    rank.extend(request)
    rank.decode(request)
    assert bool(rank.log_weight.isfinite().any())
    rank.acknowledge = False
    for _ in range(5):  # the books stay right: the scripted rank applies what came
        rank.decode(request)
    rank.settle()
    assert served.counters.withheld_packs_total == 4 * 3  # two go out per layer
    assert bool(rank.log_weight.isnan().all()), "weights stay what they were, too"
    rank.acknowledge = True
    rank.decode(request)
    rank.settle()
    assert not bool(rank.log_weight.isnan().any())
    assert served.counters.withheld_packs_total == 4 * 3


def test_a_new_hello_ends_the_old_epoch(serve):
    served = serve()
    old = served.connect()
    old.extend(old.new_request(1, 60))
    old.settle()
    new = served.connect()
    assert new.welcome.epoch == old.welcome.epoch + 1
    assert served.counters.slots_live == served.counters.rows_live == 0
    old.control.send(ClearSlots(epoch=old.welcome.epoch))
    old.control.send(FreeSlots(epoch=old.welcome.epoch, num_slots=5))
    old.settle()
    assert served.counters.old_epoch_total == 2
    request = new.new_request(1, 60)
    new.extend(request)
    new.decode(request)
    new.control.send(Goodbye(epoch=new.welcome.epoch))
    assert new.settle().epoch == 0
    assert served.counters.slots_live == 0
    assert served.counters.epochs_total == 2


def test_silence_in_the_middle_of_a_step_ends_the_epoch(serve, settings_of):
    settings = settings_of(exchange={"heartbeat_interval_s": 0.1, "heartbeat_misses": 2})
    served = serve(settings)
    rank = served.connect()
    rank.extend(rank.new_request(1, 60))
    heart = IpcDealer(served.run_dir.heartbeat_socket)
    heart.send(Heartbeat(epoch=rank.welcome.epoch, sequence=1))
    assert heart.receive(5.0).epoch == rank.welcome.epoch
    heart.close()
    step = StepBegin(
        epoch=rank.welcome.epoch,
        step_id=9,
        kind=int(StepKind.DECODE),
        rows=[RowStep(1, 1, 61, 60, int(RowFlag.SPARSE), 0)],
        dirty=[],
        num_table_slots=1,
        applied_seq=0,
    )
    rank.control.send(step)  # and then nothing
    served.wait_for(lambda: served.counters.transport_errors_total == 1)
    served.wait_for(lambda: served.counters.slots_live == 0)
    assert served.connect().settle().epoch == rank.welcome.epoch + 1


def test_a_dead_peer_ends_the_epoch(serve):
    served = serve()
    rank = served.connect()
    rank.extend(rank.new_request(1, 60))
    rank.settle()
    rank.transport.kill()
    rank.control.send(FreeSlots(epoch=rank.welcome.epoch, num_slots=5))
    served.wait_for(lambda: served.counters.transport_errors_total == 1)
    assert request_status(served.run_dir.heartbeat_socket, 5.0).epoch == 0


def step_of(rows, *, dirty=(), num_table_slots=1, applied_seq=0, kind=StepKind.DECODE):
    return StepBegin(
        epoch=1,
        step_id=7,
        kind=int(kind),
        rows=list(rows),
        dirty=list(dirty),
        num_table_slots=num_table_slots,
        applied_seq=applied_seq,
    )


@pytest.mark.parametrize(
    "step",
    [
        step_of([RowStep(1, 9, 61, 60, 0, 0)]),  # generation that nobody extended
        step_of([RowStep(2, 1, 61, 60, 0, 0)]),  # unknown row
        step_of([RowStep(99, 1, 61, 60, 0, 0)]),  # row out of range
        step_of([RowStep(1, 1, 63, 62, 0, 0)]),  # skips a position
        step_of([RowStep(1, 1, 61, 5, 0, 0)]),  # prefix is not length - 1
        step_of([RowStep(1, 1, 9999, 9998, 0, 0)]),  # longer than the context
        step_of([RowStep(1, 1, 61, 60, 0, 0)], num_table_slots=7),
        step_of([RowStep(1, 1, 61, 60, 0, 0)], applied_seq=99),
        step_of([RowStep(1, 1, 61, 60, 0, 0)] * 2, num_table_slots=2),
        step_of([RowStep(3, 1, 61, 60, 1, 0)], dirty=[RowStep(3, 1, 60, 60, 0, 0)]),
        step_of([], num_table_slots=0),
        step_of(
            [RowStep(3, 1, 80, 0, int(RowFlag.SEED | RowFlag.SPARSE), 0)],
            num_table_slots=80,
            kind=StepKind.EXTEND,
        ),
    ],
)
def test_a_wrong_step_ends_the_epoch_and_not_the_service(serve, step):
    served = serve()
    rank = served.connect()
    rank.extend(rank.new_request(1, 60))
    rank.control.send(step)
    rank.transport.issue_send(torch.ones(max(1, step.num_table_slots), dtype=torch.int32))
    assert rank.settle().epoch == 0
    assert served.counters.protocol_errors_total + served.counters.transport_errors_total == 1
    again = served.connect()
    request = again.new_request(1, 60)
    again.extend(request)
    again.decode(request)
    assert again.settle().epoch == 2


def test_slots_out_of_range_end_the_epoch(serve):
    served = serve()
    rank = served.connect()
    rank.free(torch.tensor([1 << 20]))
    assert rank.settle().epoch == 0
    rank = served.connect()
    request = rank.new_request(1, 20)
    request.slots[3] = -5
    rank.extend(request)  # short, hence nothing comes back that could be missed
    assert rank.settle().epoch == 0
    assert served.counters.protocol_errors_total == 2
