# SPDX-License-Identifier: Apache-2.0
"""Store, row table, mirror, ledger, clock and memory check, each on its own."""

import threading
import time

import msgspec
import pytest
import torch

from tandemkv.cache_rank import host_memory
from tandemkv.cache_rank.counters import BusyClock, Counters
from tandemkv.cache_rank.exchange import Exchange
from tandemkv.cache_rank.mirror import ResidentMirror
from tandemkv.cache_rank.pack_ledger import PackLedger
from tandemkv.cache_rank.protocol.errors import ProtocolError, SettingsError
from tandemkv.cache_rank.protocol.fake_transport import fake_pair
from tandemkv.cache_rank.protocol.messages import RowStep
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.step_program import Direction, Transfer, TransferKind
from tandemkv.cache_rank.row_table import RowTable
from tandemkv.cache_rank.store import KVStore, bytes_per_token

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=2,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    max_context=64,
    dtype="float32",
    model_hash="0" * 32,
)


def make_store(index_dtype="native", poison=True):
    counters = Counters()
    store = KVStore(MODEL, num_slots=20, index_dtype=index_dtype, poison=poison, counters=counters)
    return store, counters


@pytest.mark.parametrize("index_dtype", ["native", "int8"])
def test_put_read_and_index(index_dtype):
    store, counters = make_store(index_dtype)
    slots, k, v = torch.tensor([7, 3, 12]), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    for layer in range(2):
        store.put(layer, slots, k + layer, v - layer)
    got = store.read(1, slots.flip(0))
    assert torch.equal(got[0], (k + 1).flip(0))
    assert torch.equal(got[1], (v - 1).flip(0))
    keys, scale = store.index(1)
    if index_dtype == "int8":
        wide = keys[slots].float() * scale[slots].unsqueeze(-1)
        assert ((wide - k - 1).abs() <= scale[slots].unsqueeze(-1) * 0.5001).all()
    else:
        assert scale is None
        assert torch.equal(keys[slots], k + 1)
    assert (counters.slots_live, counters.slots_free) == (3, 16)


def test_slot_zero_is_padding():
    store, counters = make_store()
    nan = torch.full((2, 2, 8), float("nan"))
    store.put(0, torch.tensor([0, 5]), nan, nan)
    assert (store.k[0][0] == 0).all()
    store.free(torch.tensor([0], dtype=torch.int32))
    assert (store.v[0][0] == 0).all()
    store.note_read(torch.tensor([0, 5]))
    assert counters.stale_reads_total == 0
    assert counters.slots_live == 1


@pytest.mark.parametrize("poison", [True, False])
def test_free_then_put(poison):
    store, counters = make_store("int8", poison)
    slots, kv = torch.tensor([4, 5]), torch.ones(2, 2, 8)
    store.put(0, slots, kv, kv)
    store.free(torch.tensor([4, 4], dtype=torch.int32))
    assert counters.slots_live == 1
    assert bool(store.k[0][4].isnan().any()) == poison
    store.note_read(slots)
    assert counters.stale_reads_total == 1
    store.put(0, slots[:1], kv[:1], kv[:1])
    assert (store.k[0][4] == 1).all()
    assert counters.slots_live == 2
    store.note_read(slots)
    assert counters.stale_reads_total == 1
    store.clear()
    assert counters.slots_live == 0
    with pytest.raises(ProtocolError, match=r"0\.\.19"):
        store.free(torch.tensor([20], dtype=torch.int32))


def test_bytes_per_token():
    assert bytes_per_token(MODEL, "native") == 2 * 2 * 2 * 8 * 4
    assert bytes_per_token(MODEL, "int8") == 2 * (2 * 2 * 8 * 4 + 2 * 8 + 2 * 4)


def test_row_table_life():
    table = RowTable(max_rows=3, max_context=16, num_slots=100)
    assert table.assign(RowStep(2, 5, 4, 0, 0, 0), torch.tensor([9, 8, 7, 6])) is None
    table.append(RowStep(2, 5, 5, 4, 0, 0), 33)
    assert table.slots[2, :5].tolist() == [9, 8, 7, 6, 33]
    # Re-sent without the newest position: it stays known.
    resent = RowStep(2, 5, 4, 4, 0, 0)
    assert table.assign(resent, torch.tensor([1, 2, 3, 4]), keep_length=True) is None
    table.append(RowStep(2, 5, 6, 5, 0, 0), 34)
    assert table.slots[2, :6].tolist() == [1, 2, 3, 4, 33, 34]
    assert table.assign(RowStep(2, 6, 1, 0, 0, 0), torch.tensor([50])) == 5
    assert not table.release(2, 5)
    assert table.num_live == 1
    assert table.release(2, 6)
    assert table.num_live == 0
    with pytest.raises(ProtocolError, match="generation=6"):
        table.append(RowStep(2, 6, 2, 1, 0, 0), 1)


def test_row_zero_is_never_occupied():
    table = RowTable(max_rows=3, max_context=16, num_slots=100)
    table.assign(RowStep(0, 1, 2, 0, 0, 0), torch.tensor([5, 6]))
    table.append(RowStep(0, 1, 9, 8, 0, 0), 5)
    assert table.num_live == 0
    assert (table.slots[0] == 0).all()


def test_mirror_seed_identity_and_release():
    mirror = ResidentMirror(num_layers=2, max_rows=3, num_kv_heads=2, num_resident=5)
    mirror.seed_identity(1, 4)
    positions, last_used = mirror.load(1, torch.tensor([1]))
    assert positions[0].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert last_used.max() < 1  # before the first step
    assert (last_used.diff() > 0).all()  # the latest is the most recently used
    seeds = torch.tensor([[0, 9, 4, 7, -1], [0, 3, 2, 8, -1]], dtype=torch.int32)
    mirror.seed(0, 1, seeds)
    assert torch.equal(mirror.load(0, torch.tensor([1]))[0][0], seeds)
    assert (mirror.load(0, torch.tensor([1]))[1].diff() < 0).all()  # best used last
    assert torch.equal(mirror.load(1, torch.tensor([1]))[0], positions)
    positions += 1  # a copy: nothing is entered before `commit`
    assert mirror.load(1, torch.tensor([1]))[0].max() == 4
    mirror.commit(1, torch.tensor([1]), positions, last_used)
    assert mirror.load(1, torch.tensor([1]))[0].max() == 5
    mirror.release(1, 3)
    assert mirror.is_seeded(1, 4)
    mirror.release(1, 4)
    assert not mirror.is_seeded(1, 4)


def test_ledger_counts_per_position_and_acknowledges_in_order():
    ledger = PackLedger(2)
    assert ledger.next_seq((0,)) == (1, True)
    assert ledger.next_seq((1,)) == (2, True)
    assert ledger.next_seq((0,)) == (3, True)
    assert ledger.next_seq((0,)) == (4, False)
    ledger.acknowledge(2)
    assert ledger.next_seq((0,)) == (5, True)
    assert ledger.next_seq((0,)) == (6, False)
    assert ledger.last_seq == 6


def test_busy_clock_does_not_count_waits():
    clock = BusyClock()
    assert clock.busy_s() == 0
    with clock.working():
        time.sleep(0.02)
        with clock.waiting():
            time.sleep(0.05)
            during = clock.busy_s()
        assert 0.02 <= during < 0.05
        assert clock.busy_s() < 0.05
    assert clock.busy_s() == 0


def transfer(kind, direction, *shape):
    return Transfer(kind=kind, direction=direction, layers=(0,), shape=shape, dtype="float32")


def test_exchange_posts_ahead_and_keeps_order():
    ours, theirs = fake_pair(timeout_s=5)
    counters = Counters()
    exchange = Exchange(ours, BusyClock(), counters)
    ups = [transfer(TransferKind.HIDDEN, Direction.UP, i + 1) for i in range(6)]
    exchange.announce(ups)
    works = [theirs.issue_send(torch.full((i + 1,), float(i))) for i in range(6)]
    assert [work.is_done() for work in works] == [True] * 3 + [False] * 3
    for i, up in enumerate(ups):
        assert exchange.receive(up).tolist() == [float(i)] * (i + 1)
    with pytest.raises(ProtocolError, match="hidden"):
        exchange.receive(ups[0])
    down = transfer(TransferKind.SEED, Direction.DOWN, 3)
    exchange.send(down, torch.ones(3))
    with pytest.raises(ProtocolError, match="seed"):
        exchange.send(down, torch.ones(4))
    exchange.update_byte_counters()
    assert (counters.bytes_sent_total, counters.bytes_received_total) == (12, 4 * 21)


def test_a_slow_reader_bounds_what_is_under_way(monkeypatch):
    monkeypatch.setattr("tandemkv.cache_rank.exchange._MAX_PENDING_SENDS", 4)
    ours, theirs = fake_pair(timeout_s=5)
    exchange = Exchange(ours, BusyClock(), Counters())
    down = transfer(TransferKind.SEED, Direction.DOWN, 3)
    for _ in range(4):
        exchange.send(down, torch.ones(3))
    reader = threading.Timer(0.05, lambda: theirs.issue_recv(torch.empty(3)))
    start = time.monotonic()
    reader.start()
    exchange.send(down, torch.ones(3))  # waits for the reader
    assert time.monotonic() - start > 0.04


def test_too_little_memory_is_told_with_the_numbers(monkeypatch, settings_of):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 20)
    large = msgspec.structs.replace(MODEL, num_layers=100)
    settings = settings_of()
    with pytest.raises(SettingsError, match=r"2048 needs 0\.02 GiB.*at most 81 tokens fit"):
        host_memory.check_memory(large, settings, num_slots=2048)
    host_memory.check_memory(large, settings, num_slots=81)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    host_memory.check_memory(large, settings, num_slots=2048)


def test_available_memory_is_known_here():
    found = host_memory.available_bytes()
    assert found is not None
    assert found > 1 << 20
