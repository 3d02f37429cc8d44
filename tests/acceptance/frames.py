# SPDX-License-Identifier: Apache-2.0
"""Item *frames*: a million mutated frames to every decoder between the ranks, in one process.

Frames of the control socket, heartbeats, lists of tensors with descriptors, and records of the
ring: real encoders make them, a seeded mutator damages them. A decoder may refuse with the error
that it documents, or accept what is then within all bounds; anything else is a crash.
``TANDEMKV_FRAMES`` is their number.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from workbench import Bench, Checks

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError, SettingsError
from tandemkv.cache_rank.protocol.handshake import check_hello
from tandemkv.cache_rank.protocol.heartbeat import HeartbeatServer
from tandemkv.cache_rank.protocol.memory import descriptor_socket
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.messages import (
    CODEC,
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    PolicyTraits,
    Refused,
    StatusReply,
    StatusRequest,
    Welcome,
    decode,
    encode,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import (
    NUM_ENTRIES,
    EntryKind,
    StepEntry,
    StepRing,
    StepRow,
    ring_shape,
)

SEED = 25
SHARES = {"control": 0.4, "heartbeat": 0.2, "tensors": 0.1, "ring": 0.3}
STRANGERS = 100_000
SLOWEST_S = 1.0
MAX_ROWS = 8
TOKEN = b"t" * 32
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=4, num_qo_heads=8, num_kv_heads=2, head_dim=16,
    hidden_size=128, max_context=4096, dtype="float32", model_hash="ab" * 16,
)  # fmt: skip
Decoder = Callable[[random.Random], str]


def run(_bench: Bench) -> dict[str, Any]:
    """All decoders; the item takes minutes on one core."""
    number = int(os.environ.get("TANDEMKV_FRAMES", "1000000"))
    checks = Checks()
    found = {name: fuzz(name, round(number * share)) for name, share in SHARES.items()}
    for name, row in found.items():
        checks.add(
            f"{name}: crashes in {row['frames']} frames", row["crashes"], "0", not row["crashes"]
        )
        checks.add(f"{name}: slowest, s", row["slowest_s"], "below 1", row["slowest_s"] < SLOWEST_S)
        leaked, grown = row["descriptors_leaked"], row["rss_grown_mib"]
        checks.add(f"{name}: descriptors left open", leaked, "0", not leaked)
        checks.add(f"{name}: resident memory, MiB", grown, "grown by 16 at most", grown <= 16)
        both = row["refused"] > 0 < row["accepted"]
        checks.add(f"{name}: refused, accepted", [row["refused"], row["accepted"]], "both", both)
    told = strangers(STRANGERS)
    checks.add(f"{STRANGERS} Hellos without the token: told more than that", told, "0", told == 0)
    return checks.result(frames=sum(row["frames"] for row in found.values()), decoders=found)


def fuzz(name: str, number: int, seed: int = SEED) -> dict[str, Any]:
    """Send `number` mutated frames to one decoder."""
    rng = random.Random(f"{seed}/{name}")
    results: Counter[str] = Counter()
    crashes: list[str] = []
    slowest, process = 0.0, psutil.Process()
    with contextlib.ExitStack() as stack:
        decoder = DECODERS[name](stack)
        for _ in range(200):  # opens what stays open
            decoder(random.Random(0))
        fds, rss = _open_descriptors(process), process.memory_info().rss
        begun = time.perf_counter()
        for index in range(number):
            start = time.perf_counter()
            try:
                results[decoder(rng)] += 1
            except Exception as error:
                crashes.append(f"frame {index}: {type(error).__name__}: {error}"[:300])
            slowest = max(slowest, time.perf_counter() - start)
        seconds = time.perf_counter() - begun
        leaked = _open_descriptors(process) - fds
        grown = (process.memory_info().rss - rss) / 2**20
    return {
        "frames": number,
        "refused": results["refused"],
        "accepted": results["accepted"],
        "crashes": crashes[:20],
        "num_crashes": len(crashes),
        "slowest_s": round(slowest, 4),
        "descriptors_leaked": leaked,
        "rss_grown_mib": round(grown, 1),
        "seconds": round(seconds, 1),
    }


def _open_descriptors(process: psutil.Process) -> int:
    """How many are open once garbage is gone: cycles of earlier work hold mapped memory."""
    gc.collect()
    return process.num_fds()


def mutated(rng: random.Random, frames: list[bytes]) -> bytes:
    """Damage a frame: bytes, a field, its end, or a piece of another frame."""
    frame = bytearray(rng.choice(frames))
    if rng.random() < 0.4:
        with contextlib.suppress(Exception):  # what has no generic form is damaged bytewise
            return msgspec.msgpack.encode(_other_leaf(rng, msgspec.msgpack.decode(bytes(frame))))
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.randrange(5), rng.randrange(len(frame) + 1)
        if kind == 0 and frame:
            frame[at % len(frame)] = rng.randrange(256)
        elif kind == 1:
            del frame[at : at + rng.randint(1, 8)]
        elif kind == 2:
            frame[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            del frame[at:]
        else:
            other = rng.choice(frames)
            frame[at:] = other[rng.randrange(len(other)) :]
    return bytes(frame)


_LEAVES: tuple[Any, ...] = (
    -1, 0, 1, 255, 2**31, 2**62, 2**62 + 1, 2**63, -(2**63), 1.5, float("nan"), float("inf"), "",
    "x" * 300, "\ud7ff", b"", b"x" * 65, None, True, [], {}, [[[[]]]],
)  # fmt: skip


def _other_leaf(rng: random.Random, value: Any, depth: int = 0) -> Any:
    is_container = isinstance(value, (list, dict)) and value and depth < 6
    if not is_container or rng.random() < 0.1:
        return rng.choice(_LEAVES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return [*value, value[at]] if rng.random() < 0.5 else value[:at] + value[at + 1 :]
        return [*value[:at], _other_leaf(rng, value[at], depth + 1), *value[at + 1 :]]
    key = rng.choice(list(value))
    return value | {key: _other_leaf(rng, value[key], depth + 1)}


def messages() -> list[Message]:
    """One of each."""
    hello = Hello(
        protocol_version=PROTOCOL_VERSION, token=TOKEN, model=MODEL,
        settings=RankSettings().flat(), max_rows=8, page_size=1,
    )  # fmt: skip
    return [
        hello,
        Welcome(
            epoch=1, num_slots=100,
            traits=PolicyTraits(layer_sources=(0, 0, 2), slow_heads=((0,), (0, 1), (1,))),
        ),
        Refused(field="dtype", message="give both ranks the same"),
        Goodbye(epoch=1),
        Heartbeat(epoch=1, sequence=7),
        HeartbeatReply(epoch=1, sequence=7, busy_s=0.5),
        StatusRequest(),
        StatusReply(role="cache_rank", epoch=1, ready=True, values={"a": 1.0}, info={"b": "c"}),
    ]  # fmt: skip


def control(_stack: contextlib.ExitStack) -> Decoder:
    """Return what a control socket does with a frame; a Hello is compared with ours too."""
    frames = [encode(message) for message in messages()]
    settings = RankSettings()

    def once(rng: random.Random) -> str:
        frame = mutated(rng, frames)
        try:
            message = decode(frame)
        except ProtocolError:
            CODEC.refusal_of(frame)
            return "refused"
        again = encode(message)  # compared as bytes: NaN, which a gauge may be, is not itself
        assert encode(decode(again)) == again
        if isinstance(message, Hello):
            check_hello(message, token=TOKEN, model=MODEL, settings=settings)
        return "accepted"

    return once


def heartbeat(stack: contextlib.ExitStack) -> Decoder:
    """Return what the heartbeat's thread does with a frame."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    status = StatusReply(role="cache_rank", epoch=1, ready=True, values={}, info={})
    server = HeartbeatServer(
        Path(folder) / "h.sock", RankSettings().exchange, busy=lambda: 0.0,
        status=lambda: status, on_silence=lambda epoch: None,
    )  # fmt: skip
    stack.callback(server.close)
    server.expect(1)
    frames = [encode(Heartbeat(epoch=1, sequence=7)), encode(StatusRequest())]

    def once(rng: random.Random) -> str:
        try:
            message = decode(mutated(rng, frames))
        except ProtocolError:
            return "refused"
        reply = server._answer(message)
        if isinstance(message, Heartbeat):
            assert isinstance(reply, HeartbeatReply)
            assert reply.sequence == message.sequence
        return "accepted"

    return once


def tensors(stack: contextlib.ExitStack) -> Decoder:
    """Return what the descriptor socket does with a list of tensors and their descriptors."""
    ours = MappedTensors()
    stack.callback(ours.close)
    ours.allocate("kv", (4, 2), torch.float32)
    ours.allocate("req_to_token", (8,), torch.int32)
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.callback(receiver.close)
    stack.callback(sender.close)
    descriptor_socket.send_tensors(sender, ours, token=TOKEN, epoch=3)
    frame, descriptors, *_ = socket.recv_fds(receiver, 1 << 16, 64)
    for each in descriptors:
        os.close(each)
    good = list(ours.descriptors)

    def once(rng: random.Random) -> str:
        sent = [rng.choice(good) for _ in range(rng.randrange(4))] if rng.random() < 0.3 else good
        socket.send_fds(sender, [mutated(rng, [frame]) or b"\0"], sent)
        try:
            deadline = time.monotonic() + 5.0
            message, received = descriptor_socket.receive_descriptors(receiver, deadline)
            descriptor_socket.attach_all(message.specs, received, None).close()
        except (ProtocolError, CacheRankLostError, SettingsError):
            return "refused"
        return "accepted"

    return once


def ring(_stack: contextlib.ExitStack) -> Decoder:
    """Return what the reader of the ring does with a record."""
    words = torch.zeros(ring_shape(MAX_ROWS), dtype=torch.int64)
    flags = StepFlags(torch.zeros((2, WORDS_APART), dtype=torch.int64))
    writer = StepRing(words, flags)
    reader = StepRing(words, flags)
    values = (-1, 0, 1, 2, 3, 4, MAX_ROWS, MAX_ROWS + 1, 2**20, 2**31, 2**62, -(2**63))

    def once(rng: random.Random) -> str:
        rows = tuple(
            StepRow(row=rng.randrange(MAX_ROWS), generation=1, length=30, prefix_len=29)
            for _ in range(rng.randint(1, MAX_ROWS))
        )
        entry = StepEntry(kind=rng.choice(list(EntryKind)), step=writer._num + 1, rows=rows)
        writer.write(entry, timeout_s=1.0, is_over=lambda: False)
        record = words[writer._num % NUM_ENTRIES]
        for _ in range(rng.randint(1, 4)):
            value = rng.choice(values) if rng.random() < 0.8 else rng.getrandbits(63)
            record[rng.randrange(6 + len(rows) * 6)] = value
        try:
            found = reader.read(timeout_s=1.0, is_over=lambda: False)
            rows = () if found is None else tuple(found.rows)  # which are read when asked for
        except ProtocolError:
            reader._num = writer._num  # the epoch would end; here the next frame is read
            flags.raise_to(1, writer._num)
            return "refused"
        assert found is not None
        assert len(found.rows) == len(rows) <= MAX_ROWS
        for row in rows:
            assert 0 <= row.prefix_len <= row.length
            assert min(row.row, row.generation, row.window) >= 0
        return "accepted"

    return once


def strangers(number: int) -> int:
    """Send Hellos with wrong tokens, and more that differs; return how many are told more."""
    rng, settings, told = random.Random(SEED), RankSettings(), 0
    right = next(message for message in messages() if isinstance(message, Hello))
    models = [MODEL, msgspec.structs.replace(MODEL, num_layers=5)]
    for _ in range(number):
        token = bytearray(TOKEN)
        token[rng.randrange(32)] ^= rng.randrange(1, 256)
        bad = rng.choice([bytes(token), TOKEN[:31], TOKEN + b"t", rng.randbytes(32), b""])
        hello = msgspec.structs.replace(right, token=bad, model=rng.choice(models))
        refused = check_hello(hello, token=TOKEN, model=MODEL, settings=settings)
        told += refused is None or refused.field != "token"
    return told


DECODERS: dict[str, Callable[[contextlib.ExitStack], Decoder]] = {
    "control": control,
    "heartbeat": heartbeat,
    "tensors": tensors,
    "ring": ring,
}
