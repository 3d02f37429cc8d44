# SPDX-License-Identifier: Apache-2.0
"""What the two ends of a link between hosts tell each other, besides steps and K/V.

The inference rank's end speaks first. `Knock` is answered at once, `Meet` once the cache rank's
host has its memory (`opening.opening_s`), with what they ask for or with `Refused` or `Ended`;
`Heartbeat` with `HeartbeatReply`, which comes before the answer to `Knock` too: it finds out
whether the sender is still there. Either end may say `Ended`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.messages import (
    AnyHello,
    Codec,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Id,
    Refused,
    Text,
    Token,
    Welcome,
)

RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
Place = Annotated[bytes, msgspec.Meta(max_length=1024)]
"""Where an end of the data plane is met, as gloo or NCCL writes it."""


class _Letter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Knock(_Letter, frozen=True, tag=21):
    """Ask for an epoch; `hello` is the inference rank's, without its token.

    `rank` is the number of the cache rank that is meant, of all of the server.
    """

    protocol_version: Id
    hello: Hello
    rank: RankNumber = 0


class _AnyKnock(AnyHello, frozen=True, tag=21):
    """What is common to the `Knock` of every protocol version."""


class Admitted(_Letter, frozen=True, tag=22):
    """The cache rank has opened an epoch; the data plane is next."""

    welcome: Welcome


class Meet(_Letter, frozen=True, tag=23):
    """Open the data plane of an epoch: the sender is met at `place`, and shows `token` there.

    `tensors` are what both ends hold besides what they derive; their contents come first. `is_new`:
    what is known of requests is of an inference rank that ended. `wires`: where the GPUs of the
    two hosts meet, one for each direction, outward and back; none on CPUs.
    """

    epoch: Id
    place: Place
    token: Token
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=64)] = ()
    is_new: bool = True
    wires: Annotated[tuple[Place, ...], msgspec.Meta(max_length=2)] = ()

    def __repr__(self) -> str:  # the token must not reach a log
        return f"Meet(epoch={self.epoch}, ...)"


class Met(_Letter, frozen=True, tag=24):
    """Answers `Meet` with the other place."""

    epoch: Id
    place: Place


class Opened(_Letter, frozen=True, tag=28):
    """The engine has taken the memory; `memory` names the memory that K/V of this epoch are in."""

    epoch: Id
    memory: Id


class Ended(_Letter, frozen=True, tag=27):
    """The epoch is over at the sender's."""

    epoch: Id
    reason: Text


Letter = Knock | Admitted | Meet | Met | Opened | Heartbeat | HeartbeatReply | Ended | Refused

CODEC: Codec[Letter] = Codec(msgspec.msgpack.Decoder(Letter), _AnyKnock)
