# SPDX-License-Identifier: Apache-2.0
"""Mapped tensors, descriptors, flags and the ring: what two processes of a host meet in."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from descriptors import open_descriptors

from tandemkv.cache_rank.protocol import step_flags
from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
    SettingsError,
)
from tandemkv.cache_rank.protocol.memory import host_memory, mapped_tensors
from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.memory.descriptor_socket import (
    DescriptorListener,
    offer_tensors,
    send_tensors,
    wait_for_hang_up,
    withdraw_tensors,
)
from tandemkv.cache_rank.protocol.memory.host_memory import create_memory
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import (
    NUM_ENTRIES,
    RESIDENT,
    SLOW,
    EntryKind,
    StepEntry,
    StepRing,
    StepRow,
    ring_shape,
)

TOKEN = b"t" * 32


def never() -> bool:
    return False


def lowest_free_descriptor() -> int:
    """The number that the next one gets: RLIMIT_NOFILE bounds numbers, not how many are open."""
    number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)
    return number


def test_a_tensor_is_mapped_twice_and_outlives_its_maker() -> None:
    made, mapped = MappedTensors(), MappedTensors()
    first = made.allocate("kv", (2, 3), torch.float32)
    assert not first.any()
    assert made.allocate("kv", (2, 3), "float32") is first
    second = mapped.attach(made.specs[0], os.dup(made.descriptors[0]))
    first[1, 2] = 5.0
    made.close()
    assert "kv" not in made
    assert second.tolist() == [[0, 0, 0], [0, 0, 5.0]]
    mapped.close()


def test_another_shape_or_size_is_refused_and_nothing_stays_open() -> None:
    tensors, before = MappedTensors(), open_descriptors()
    tensors.allocate("kv", (1024, 4), torch.float32)
    with pytest.raises(ProtocolError, match=r"'kv' is float32\[1024, 4\], float32\[1024, 5\]"):
        tensors.allocate("kv", (1024, 5), torch.float32)
    wrong = TensorSpec("other", (4096, 4), "float32")
    with pytest.raises(ProtocolError, match=r"has 16384 bytes, .* needs 65536; start both ranks"):
        tensors.attach(wrong, os.dup(tensors.descriptors[0]))
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, 65536)
    with pytest.raises(ProtocolError, match="size is not sealed"):
        tensors.attach(wrong, unsealed)
    tensors.close()
    assert open_descriptors() == before


def test_memory_that_is_not_to_be_had_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 20)
    with pytest.raises(SettingsError, match=r"kv needs 0\.01 GiB, .*lower --cache-tokens"):
        create_memory("kv", 8 << 20)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SettingsError, match="ulimit -f"):
            create_memory("kv", 8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
    try:
        with pytest.raises(SettingsError, match="ulimit -n"):
            create_memory("kv", 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def listener(tmp_path: Path) -> DescriptorListener:
    return DescriptorListener(tmp_path / "m.sock")


def offer(path: Path, tensors: MappedTensors, token: bytes = TOKEN) -> list[object]:
    found: list[object] = []

    def run() -> None:
        try:
            found.extend(offer_tensors(path, [tensors], token=token, epoch=3, timeout_s=5))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    found.append(thread)
    return found


def test_tensors_travel_both_ways_and_an_end_is_noticed(
    tmp_path: Path, listener: DescriptorListener
) -> None:
    ours, books = MappedTensors(), MappedTensors()
    ours.allocate("kv", (4,), torch.float32)
    books.allocate("positions", (2,), torch.int32)[0] = 7
    found = offer(tmp_path / "m.sock", ours)
    connection, theirs = listener.accept(token=TOKEN, epoch=3, timeout_s=5)
    theirs["kv"][3] = 2.0
    send_tensors(connection, books)
    thread, *rest = found
    thread.join()  # type: ignore[attr-defined]
    ours_end, held = found[1:]
    assert ours["kv"].tolist() == [0, 0, 0, 2.0]
    assert held["positions"].tolist() == [7, 0]  # type: ignore[index]
    wake, waker = socket.socketpair()
    connection.close()
    assert wait_for_hang_up(ours_end, wake)  # type: ignore[arg-type]
    waker.close()
    books.close()
    assert held["positions"].tolist() == [7, 0]  # type: ignore[index]
    listener.close()
    assert not (tmp_path / "m.sock").exists()
    assert rest is not None


def test_a_refusal_is_told_and_strangers_are_turned_away(
    tmp_path: Path, listener: DescriptorListener
) -> None:
    ours = MappedTensors()
    ours.allocate("kv", (4,), torch.float32)
    stranger = offer(tmp_path / "m.sock", ours, token=b"x" * 32)
    with pytest.raises(CacheRankLostError, match="did not send its memory in time"):
        listener.accept(token=TOKEN, epoch=3, timeout_s=0.5)
    stranger[0].join()  # type: ignore[attr-defined]
    assert isinstance(stranger[1], CacheRankLostError)
    found = offer(tmp_path / "m.sock", ours)
    connection, _ = listener.accept(token=TOKEN, epoch=3, timeout_s=5)
    send_tensors(connection, error="too large for me")
    found[0].join()  # type: ignore[attr-defined]
    assert isinstance(found[1], HandshakeRefusedError)
    assert "too large for me" in str(found[1])
    listener.close()


def test_memory_that_cannot_be_mapped_is_refused_in_words(
    tmp_path: Path, listener: DescriptorListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs without peer access, of which the cache rank is the first to know."""

    def map_nothing(*_: object) -> torch.Tensor:
        raise SettingsError("cannot be used from here")

    ours = MappedTensors()
    ours.allocate("kv", (4,), torch.float32)
    monkeypatch.setattr(mapped_tensors, "map_memory", map_nothing)
    found = offer(tmp_path / "m.sock", ours)
    with pytest.raises(SettingsError, match="cannot be used from here"):
        listener.accept(token=TOKEN, epoch=3, timeout_s=5)
    found[0].join()  # type: ignore[attr-defined]
    assert isinstance(found[1], HandshakeRefusedError)
    assert "SettingsError: cannot be used from here" in str(found[1])
    listener.close()


def test_who_withdraws_ends_the_wait_for_its_own_epoch(
    tmp_path: Path, listener: DescriptorListener
) -> None:
    path = tmp_path / "m.sock"
    withdraw_tensors(path, token=TOKEN, epoch=2, reason="of the epoch before")
    withdraw_tensors(path, token=TOKEN, epoch=3, reason="I have given up")
    with pytest.raises(CacheRankLostError, match="I have given up"):
        listener.accept(token=TOKEN, epoch=3, timeout_s=60)
    listener.close()
    withdraw_tensors(path, token=TOKEN, epoch=4, reason="to nobody")


WAIT = {"timeout_s": 30, "is_over": never}


def flags(count: int = 4) -> StepFlags:
    return StepFlags(torch.zeros((count, WORDS_APART), dtype=torch.int64))


def test_a_flag_is_for_its_step_and_later_ones() -> None:
    found = flags()
    assert not found.wait(1, 1, timeout_s=0.05, is_over=never)
    found.raise_to(1, 3)
    assert found.wait(1, 2, timeout_s=0, is_over=never)
    assert not found.wait(1, 4, timeout_s=0.02, is_over=never)
    assert found.value(0) == found.value(2) == 0
    assert not found.wait(1, 4, timeout_s=60, is_over=lambda: True)
    threading.Timer(0.05, found.raise_to, (1, 4)).start()
    assert found.wait(1, 4, timeout_s=30, is_over=never)


def test_only_who_may_sleep_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call takes longer than all else that an announcement asks of its writer."""
    found, calls = flags(), []
    found._always_wakes = False
    real = step_flags._libc.syscall

    def syscall(number: int, *given: Any) -> int:
        calls.append(given[1])
        result: int = real(number, *given)
        return result

    monkeypatch.setattr(step_flags, "_libc", SimpleNamespace(syscall=syscall))
    found.raise_to(1, 1)
    assert found.wait(1, 1, timeout_s=30, is_over=never)
    assert not calls
    sleeper = threading.Thread(target=found.wait, args=(1, 2), kwargs=WAIT)
    sleeper.start()
    while not calls:
        time.sleep(0.001)
    found.raise_to(1, 2)
    sleeper.join(30)
    assert not sleeper.is_alive()
    assert step_flags._FUTEX_WAKE in calls
    calls.clear()
    found.raise_to(1, 3)  # whoever slept is awake
    assert not calls
    found._always_wakes = True  # as not on x86-64
    found.raise_to(1, 4)
    assert calls == [step_flags._FUTEX_WAKE]


def test_who_stays_awake_sees_a_flag_without_having_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flags()
    slept: list[int] = []
    monkeypatch.setattr(found, "_sleep", lambda index, seen: slept.append(index))
    timer = threading.Timer(0.05, found.raise_to, (1, 4))  # another thread has its turn
    timer.start()
    assert found.wait(1, 4, timeout_s=30, is_over=never, awake_until=time.monotonic() + 30)
    timer.join()
    assert not found.wait(1, 5, timeout_s=0.02, is_over=never, awake_until=time.monotonic() + 30)
    assert not found.wait(1, 5, timeout_s=30, is_over=lambda: True, awake_until=float("inf"))
    assert not slept
    assert not found.wait(1, 5, timeout_s=0.02, is_over=never, awake_until=time.monotonic() - 1)
    assert slept


def test_entries_come_in_order_and_a_full_ring_is_an_error() -> None:
    words, shared = torch.zeros(ring_shape(3), dtype=torch.int64), flags()
    writer = StepRing(words, shared)
    reader = StepRing(words, shared)
    assert reader.read(timeout_s=0.01, is_over=never) is None
    rows = (StepRow(row=2, generation=1 << 50, length=9, prefix_len=8, window=4, flags=6),)
    entries = [
        StepEntry(kind=EntryKind.DECODE, step=n, variant=2, num_cold=7, rows=rows * (n % 4))
        for n in range(1, 3 * NUM_ENTRIES)
    ]
    for entry in entries:
        before = time.monotonic_ns()
        writer.write(entry, timeout_s=1, is_over=never)
        found = reader.read(timeout_s=1, is_over=never)
        assert replace(found, rows=tuple(found.rows)) == entry
        assert before <= found.announced_ns <= time.monotonic_ns()
    for entry in entries[:NUM_ENTRIES]:
        writer.write(entry, timeout_s=1, is_over=never)
    with pytest.raises(CacheRankLostError, match="does not read"):
        writer.write(entries[0], timeout_s=0.05, is_over=never)
    with pytest.raises(ProtocolError, match="4 requests in a step, at most 3"):
        writer.write(
            StepEntry(kind=EntryKind.EXTEND, step=1, rows=rows * 4), timeout_s=1, is_over=never
        )
    words[(reader._num + 1) % NUM_ENTRIES, 0] = 99
    with pytest.raises(ProtocolError, match="kind=99"):
        reader.read(timeout_s=1, is_over=never)


def test_every_kind_and_flag_of_an_entry_arrives_and_damaged_ones_are_refused() -> None:
    words = torch.zeros(ring_shape(2), dtype=torch.int64)
    signals = flags(2)
    writer, reader = (StepRing(words, signals) for _ in range(2))
    sound = StepRow(row=1, generation=2, length=9, prefix_len=8, window=1)
    for kind in EntryKind:
        for flag in (0, SLOW, RESIDENT, SLOW | RESIDENT):
            entry = StepEntry(kind=kind, step=1, rows=(sound._replace(flags=flag), sound))
            writer.write(entry, timeout_s=1, is_over=never)
            found = reader.read(timeout_s=1, is_over=never)
            assert replace(found, rows=tuple(found.rows)) == entry
    for damaged in (
        {"row": -1},
        {"generation": -1},
        {"prefix_len": 10},
        {"window": -1},
        {"flags": 1},
    ):
        entry = StepEntry(kind=EntryKind.DECODE, step=1, rows=(sound._replace(**damaged),))
        writer.write(entry, timeout_s=1, is_over=never)
        found = reader.read(timeout_s=1, is_over=never)
        assert len(found.rows) == 1
        with pytest.raises(ProtocolError, match="out of bounds"):
            found.rows[0]


def test_tensors_that_nobody_has_leave_no_descriptor() -> None:
    before = open_descriptors()
    tensors = MappedTensors()
    kept = tensors.allocate("kept", (4,), torch.float32).fill_(2.0)
    assert open_descriptors() == before + 2
    del tensors
    assert open_descriptors() == before + 1, "that of the mapping, which is in use"
    assert kept.tolist() == [2.0] * 4
    del kept
    assert open_descriptors() == before
