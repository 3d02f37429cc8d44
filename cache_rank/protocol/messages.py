# SPDX-License-Identifier: Apache-2.0
"""Messages of the control plane: msgspec arrays with integer tags and bounded fields.

Steps and K/V never travel here: both ranks map them (`shared_region`, `step_ring`).
The inference rank speaks first; only `Hello`, `StatusRequest` and `Heartbeat` are answered.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Generic, TypeVar

import msgspec

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

from .errors import ProtocolError

PROTOCOL_VERSION = 17
MAX_FRAME_BYTES = 1 << 20
MAX_SETTINGS_BYTES = 1 << 16
"""What settings of a selection may take as text, all together: options of a policy may be lists."""

Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
MAX_TEXT = 4096
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
SettingText = Annotated[str, msgspec.Meta(max_length=MAX_SETTINGS_BYTES)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Token = Annotated[bytes, msgspec.Meta(max_length=64)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Timing(IntEnum):
    """When a policy's selection is used. Travels in the handshake."""

    NONE = 0
    """Selects nothing in decode (streaming, exact)."""
    SAME_STEP_HIDDEN = 1
    """Answers within the step from the residual stream of an earlier layer (look_ahead)."""
    SAME_STEP_QUERY = 2
    """Answers within the step from the true query (oracle)."""
    NEXT_STEP = 3
    """Answers one step later (async_spade, last_query)."""
    EXACT_STEP = 4
    """Selects in slow steps with their true query, for the steps after it (sfi, sync_kv)."""
    SAME_STEP_ATTENTION = 5
    """Selects and attends on the cache rank, with the step's true query (lfps)."""


class RefreshRule(IntEnum):
    """Which decode steps of a sparse row are slow. Decided on the inference rank."""

    NEVER = 0
    BOUNDARY = 1
    """After a token that ends in a trigger, or `refresh_interval` steps without one."""
    PERIOD = 2
    """Every `refresh_interval` steps."""


LayerId = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class PolicyTraits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a step depends on, besides the timing. Travels in the handshake.

    `layer_sources`: for each layer, the layer whose selection it uses; empty if each its own.
    `slow_heads`: for each layer, the KV heads that a selection of a slow step is made with; empty
    if all.
    """

    layer_sources: Annotated[tuple[LayerId, ...], msgspec.Meta(max_length=4096)] = ()
    slow_heads: Annotated[
        tuple[Annotated[tuple[LayerId, ...], msgspec.Meta(max_length=1024)], ...],
        msgspec.Meta(max_length=4096),
    ] = ()


class Hello(_Message, frozen=True, tag=1):
    """Open an epoch.

    `gpus` are the UUIDs of the model's GPU, of the engine's and of those that have a part of the
    pool, as the inference rank counts them;
    none where both are on the host.
    """

    protocol_version: Id
    token: Token
    model: ModelSpec
    settings: Annotated[dict[ShortText, SettingText], msgspec.Meta(max_length=128)]
    max_rows: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    gpus: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=66)] = ()

    def __repr__(self) -> str:  # the token must not reach a log
        return f"Hello(protocol_version={self.protocol_version}, model={self.model!r}, ...)"


class AnyHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What is common to the `Hello` of every protocol version."""

    protocol_version: Id


class Welcome(_Message, frozen=True, tag=2):
    """The epoch is open."""

    epoch: Id
    num_slots: Id
    traits: PolicyTraits = PolicyTraits()


class Refused(_Message, frozen=True, tag=3):
    """The handshake failed on `field`."""

    field: ShortText
    message: Text


class Goodbye(_Message, frozen=True, tag=4):
    """Close the epoch in good order."""

    epoch: Id


class Heartbeat(_Message, frozen=True, tag=5):
    """Prove that the inference rank lives; answered at once with `HeartbeatReply`."""

    epoch: Id
    sequence: Id


class HeartbeatReply(_Message, frozen=True, tag=6):
    """`busy_s` is how long the current message has kept the service busy, waits for us excluded."""

    epoch: Id
    sequence: Id
    busy_s: Seconds


class StatusRequest(_Message, frozen=True, tag=7):
    """Ask for counters; anybody who can open the socket may."""


TOTALS_OF_PROCESS = (
    "protocol_errors_total", "refused_total", "epochs_total", "malformed_frames_total"
)  # fmt: skip
"""What a cache rank counts as long as its process lives; its other counters restart each epoch."""


class StatusReply(_Message, frozen=True, tag=8):
    """Counters and gauges by name."""

    role: ShortText
    epoch: Id
    ready: bool
    values: Annotated[dict[ShortText, float], msgspec.Meta(max_length=512)]
    info: Annotated[dict[ShortText, Text], msgspec.Meta(max_length=64)]


Message = (
    Hello | Welcome | Refused | Goodbye | Heartbeat | HeartbeatReply | StatusRequest | StatusReply
)

_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Codec(Generic[T]):
    """Frames of one union of messages, of which `opening` is what the first one has always had."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], opening: type[AnyHello]) -> None:
        self._decoder, self._opening = decoder, msgspec.msgpack.Decoder(opening)

    def encode(self, message: T | Refused) -> bytes:
        """Return the frame of `message`; raises `ProtocolError` beyond `MAX_FRAME_BYTES`."""
        frame = _ENCODER.encode(message)
        _check_length(frame)
        return frame

    def decode(self, frame: bytes) -> T:
        """Return the message in `frame`.

        Raises `ProtocolError` if the frame is too long, malformed, or a field is out of bounds.
        """
        _check_length(frame)
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from error

    def refusal_of(self, frame: bytes) -> Refused | None:
        """Return the answer to a first message of another protocol version; else None."""
        try:
            version = self._opening.decode(frame).protocol_version
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return None if version == PROTOCOL_VERSION else refuse_version(version)


def refuse_version(version: int) -> Refused:
    """Return the refusal of a peer that speaks protocol `version`."""
    return Refused(
        field="protocol_version",
        message=f"inference rank has {version}, cache rank has {PROTOCOL_VERSION}; "
        "install the same tandemkv version on both sides",
    )


def _check_length(frame: bytes) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")


CODEC: Codec[Message] = Codec(msgspec.msgpack.Decoder(Message), AnyHello)
encode, decode = CODEC.encode, CODEC.decode
