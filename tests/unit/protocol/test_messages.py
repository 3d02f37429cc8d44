# SPDX-License-Identifier: Apache-2.0
"""Frames: every message survives the wire, nothing else does any harm."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.messages import (
    CODEC,
    MAX_FRAME_BYTES,
    MAX_SETTINGS_BYTES,
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
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=4,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=128,
    max_context=4096,
    dtype="float32",
    model_hash="ab" * 16,
)
HELLO = Hello(
    protocol_version=1,
    token=b"t" * 32,
    model=MODEL,
    settings={"selection.policy": "look_ahead"},
    max_rows=8,
    page_size=1,
)
MESSAGES: list[Message] = [
    HELLO,
    Welcome(
        epoch=9,
        num_slots=65536,
        traits=PolicyTraits(layer_sources=(0, 0, 2), slow_heads=((0,), (0, 1), (1,))),
    ),
    Refused(field="dtype", message="differs"),
    Goodbye(epoch=9),
    Heartbeat(epoch=9, sequence=1),
    HeartbeatReply(epoch=9, sequence=1, busy_s=0.5),
    StatusRequest(),
    StatusReply(role="cache", epoch=9, ready=True, values={"steps": 1.0}, info={"policy": "x"}),
]


def _outcome(frame: bytes) -> Message | None:
    """Decode; whatever escapes besides `ProtocolError` fails the test."""
    try:
        return decode(frame)
    except ProtocolError:
        return None


def test_list_is_complete() -> None:
    assert {type(m) for m in MESSAGES} == set(Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_sound(frame: bytes) -> None:
    _outcome(frame)
    CODEC.refusal_of(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000,  # nested arrays
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([4]),
        msgspec.msgpack.encode([4, 1, 2]),
        msgspec.msgpack.encode({"epoch": 1}),
        b"\x00" * (MAX_FRAME_BYTES + 1),
    ],
    ids=["empty", "deep", "unknown tag", "too few", "too many", "map", "too long"],
)
def test_malformed_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (MESSAGES[0], {"token": b"t" * 65}),
        (MESSAGES[0], {"max_rows": 0}),
        (MESSAGES[0], {"page_size": 1025}),
        (MESSAGES[0], {"settings": {str(i): "" for i in range(129)}}),
        (MESSAGES[0], {"settings": {"x": "y" * (MAX_SETTINGS_BYTES + 1)}}),
        (MESSAGES[0], {"model": msgspec.structs.replace(MODEL, num_layers=0)}),
        (MESSAGES[1], {"num_slots": -1}),
        (MESSAGES[1], {"traits": PolicyTraits(layer_sources=(-1,))}),
        (MESSAGES[1], {"epoch": -1}),
        (MESSAGES[1], {"epoch": (1 << 62) + 1}),
        (MESSAGES[5], {"busy_s": float("nan")}),
        (MESSAGES[5], {"busy_s": -1.0}),
        (MESSAGES[5], {"busy_s": float("inf")}),
        (MESSAGES[7], {"values": {str(i): 0.0 for i in range(513)}}),
    ],
)
def test_fields_out_of_bounds_are_refused(message: Message, change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(msgspec.structs.replace(message, **change)))


def test_encode_refuses_what_decode_would() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        encode(Refused(field="x", message="y" * MAX_FRAME_BYTES))


def test_a_status_tells_the_longest_name_of_a_policy() -> None:
    name = "a:" + "b" * 1022
    info = {"policy": SelectionSettings(policy=name).policy}
    status = StatusReply(role="cache_rank", epoch=0, ready=True, values={}, info=info)
    assert decode(encode(status)) == status
    with pytest.raises(ValidationError, match="at most 1024 characters"):
        SelectionSettings(policy=name + "b")


def test_hello_does_not_show_its_token() -> None:
    assert "ttt" not in repr(HELLO)
    assert "ttt" not in f"{HELLO}"


def test_version_of_a_foreign_hello_is_read() -> None:
    frame = msgspec.msgpack.encode([1, 7, "whatever", {"a": 1}, 3, 4, 5, 6, 7, 8])
    assert _outcome(frame) is None
    refused = CODEC.refusal_of(frame)
    assert refused is not None
    assert refused.message.startswith("inference rank has 7,")
    assert CODEC.refusal_of(encode(Goodbye(epoch=1))) is None
