# SPDX-License-Identifier: Apache-2.0
"""Open an epoch: both ranks compare everything that must agree, and name what does not."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence

import msgspec

from tandemkv.cache_rank.protocol.memory.shared_devices import differing_gpu
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .control import ControlClient
from .errors import HandshakeRefusedError, ProtocolError, TandemKVError
from .messages import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    HeartbeatReply,
    Hello,
    Refused,
    Welcome,
    refuse_version,
)

_SHOWN = 128
_ADVICE = {
    "model_hash": "point both ranks at the same model directory",
    "dtype": "give both ranks the same --dtype",
    "max_context": "give both ranks the same --context-length",
}


def check_hello(
    hello: Hello,
    *,
    token: bytes,
    model: ModelSpec,
    settings: RankSettings,
    gpus: Sequence[str] = (),
) -> Refused | None:
    """Compare `hello` with what the cache rank has; `gpus` as of `shared_devices.gpu_uuids`.

    The order is version, token, model, settings, GPUs. Nothing about the model, the
    settings or the GPUs is told to a peer without the token. Returns the first field that differs
    with both values and what to do, never the token; None if all agree.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        return refuse_version(hello.protocol_version)
    if not hmac.compare_digest(hello.token, token):
        return Refused(
            field="token",
            message="the tokens differ; start both ranks with the same --run-dir",
        )
    theirs, ours = msgspec.structs.asdict(hello.model), msgspec.structs.asdict(model)
    for field in ("model_hash", *(name for name in ours if name != "model_hash")):
        if theirs[field] != ours[field]:
            # None is a value of a model's field; of a setting it means that a side lacks it.
            return _refuse(
                field, *("None" if x is None else x for x in (theirs[field], ours[field]))
            )
    flat = settings.flat()
    for field in (*flat, *sorted(set(hello.settings) - set(flat))):
        if hello.settings.get(field) != flat.get(field):
            return _refuse(field, hello.settings.get(field), flat.get(field))
    reason = differing_gpu(hello.gpus, gpus)
    return None if reason is None else Refused(field="gpus", message=reason)


def open_epoch(
    client: ControlClient,
    hello: Hello,
    timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> Welcome:
    """Send `hello` and return the cache rank's `Welcome`; `meanwhile` is as of `answer_to`.

    Raises `HandshakeRefusedError` if the cache rank refuses; `field` names what differs;
    `CacheRankLostError` if there is no answer within `timeout_s`, or the process that was asked
    ends before; `ProtocolError` if the answer is neither.
    """
    deadline = time.monotonic() + timeout_s
    client.send(hello)
    reply = client.answer_to(hello, timeout_s, meanwhile)
    while isinstance(reply, HeartbeatReply):  # whether we are still there
        reply = client.answer_to(hello, deadline - time.monotonic(), meanwhile)
    if isinstance(reply, Refused):
        raise HandshakeRefusedError(reply.field, reply.message)
    if not isinstance(reply, Welcome):
        raise ProtocolError(f"Hello was answered with {type(reply).__name__}")
    return reply


def refusal_for(error: BaseException) -> Refused:
    """Return what tells of `error` whoever asks for an epoch; a refusal is passed on as it came."""
    if isinstance(error, HandshakeRefusedError):
        return Refused(field=error.field, message=error.reason[:MAX_TEXT])
    text = str(error) if isinstance(error, TandemKVError) else f"{type(error).__name__}: {error}"
    return Refused(field="cache_rank", message=text[:MAX_TEXT])


def still_waits(send: Callable[[bytes, HeartbeatReply], bool], peer: bytes) -> bool:
    """Whether who asks for an epoch is there, by a message that it ignores; `send` tells."""
    return send(peer, HeartbeatReply(epoch=0, sequence=0, busy_s=0.0))


def _refuse(field: str, theirs: object, ours: object) -> Refused:
    advice = _ADVICE.get(field, "start both ranks with the same settings")
    return Refused(
        field=field[:_SHOWN],
        message=f"inference rank has {field[:_SHOWN]}={_show(theirs)}, "
        f"cache rank has {_show(ours)}; {advice}",
    )


def _show(value: object) -> str:
    return "no such field" if value is None else str(value)[:_SHOWN]
