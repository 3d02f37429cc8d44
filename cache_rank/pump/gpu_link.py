# SPDX-License-Identifier: Apache-2.0
"""What carries steps between two pumps: records on CPUs, wires of NCCL between GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError
from tandemkv.cache_rank.protocol.message.data_plane import INFERENCE_END, DataPlane, MeetingPoint
from tandemkv.cache_rank.protocol.message.nccl_wire import MOST_CTAS, NcclWire, prepare_nccl
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from .contents import Contents
from .lanes import HostReceiveLane, HostSendLane
from .records import Outbox
from .side import Side
from .stream_lanes import StreamLane, StreamReceiveLane, StreamSendLane

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.5
SendLane = HostSendLane | StreamSendLane
ReceiveLane = HostReceiveLane | StreamReceiveLane
Wires = tuple[NcclWire, ...]
"""One away from the inference rank and one back; none on CPUs."""


@dataclass(frozen=True, slots=True)
class PumpLanes:
    """Both directions of a pump."""

    sends: SendLane
    receives: ReceiveLane

    def watches(self, await_over: Callable[[float], bool]) -> tuple[Callable[[], None], ...]:
        """Return what is to run beside the lanes, until `await_over`; nothing on a CPU.

        Of what a lane on a GPU has waited for in vain nobody else learns: it raises
        `CacheRankLostError`, where it waited, and warns where its messages came. At the end the log
        says what the latest step still lacked.
        """
        sends, receives = self.sends, self.receives
        if not isinstance(sends, StreamSendLane) or not isinstance(receives, StreamReceiveLane):
            return ()

        def watch() -> None:
            is_told = False
            while not await_over(_LOOK_S):
                if reason := sends.lost_reason():
                    _LOG.warning("%s", reason)
                    raise CacheRankLostError(reason)
                if not is_told and (reason := receives.lost_reason()):
                    _LOG.warning("%s", reason)
                    is_told = True
            for lane in (sends, receives):
                if standing := lane.standing():
                    _LOG.info("in the midst of %s", standing)

        return (watch,)

    def abort(self, reason: str) -> None:
        """End what waits on a GPU, before its communicators are broken. Safe from any thread."""
        del reason
        for lane in (self.sends, self.receives):
            if isinstance(lane, StreamLane):
                lane.abort()

    def close(self) -> None:
        """Let go of what was captured, once no thread uses the lanes: wires end behind that."""
        for lane in (self.sends, self.receives):
            if isinstance(lane, StreamLane):
                lane.close()


def make_lanes(
    side: Side, sent: Contents, received: Contents, out: Outbox, wires: Wires, timeout_s: float
) -> PumpLanes:
    """Return the lanes of a pump.

    `out` carries what is sent on a CPU; a GPU waits at most `timeout_s` for a rank of this host.
    """
    if not wires:
        return PumpLanes(HostSendLane(side, sent, out), HostReceiveLane(side, received))
    torch.cuda.empty_cache()  # of an earlier epoch's graphs; later it would take what lanes keep
    outward, back = wires
    is_near = outward.sends
    sends, receives = (outward, back) if is_near else (back, outward)
    return PumpLanes(
        StreamSendLane(side, sent, sends, timeout_s=timeout_s, number=10, is_back=not is_near),
        StreamReceiveLane(
            side, received, receives, timeout_s=timeout_s, number=12, is_back=is_near
        ),
    )


def meet_host(
    end: int, device: torch.device, interface: str, settings: RankSettings, timeout_s: float,
    token: bytes, tell: Callable[[bytes, tuple[bytes, ...]], bytes], places: tuple[bytes, ...] = (),
) -> tuple[DataPlane, Wires]:  # fmt: skip
    """Return the data plane to the other host, and the wires of `open_wires`, which break with it.

    `tell` is given where this end is met, its wires as well, and returns where the other end is.
    Both know `token`. Raises as `MeetingPoint` and its `meet`, `open_wires`, `NcclWire.meet`, and
    `tell` do.
    """
    limit_s, num_sharing = settings.exchange.transfer_timeout_s, settings.placement.head_shards
    point = MeetingPoint(interface, end, timeout_s=timeout_s, transfer_timeout_s=limit_s)
    wires = open_wires(end, device, interface, timeout_s, places, num_sharing=num_sharing)
    try:
        plane = point.meet(tell(point.place, tuple(wire.place for wire in wires)), token)
    except BaseException:
        break_wires(wires, "the two hosts do not meet")
        raise
    plane.breaks_with += [wire.abort for wire in wires]
    try:
        for wire, place in zip(wires, places or (b"",) * len(wires), strict=True):
            wire.meet(place)
    except BaseException:
        plane.close()
        raise
    return plane, wires


def open_wires(
    end: int, device: torch.device, interface: str, timeout_s: float,
    places: tuple[bytes, ...] = (), num_sharing: int = 1,
) -> Wires:  # fmt: skip
    """Begin to connect GPU `device` with that of the other host; on a CPU there is nothing to.

    Both have met within `timeout_s`. The cache rank's end needs the `places` of the inference
    rank's. So many cache ranks share the model's GPU, and what a transfer may take of it. Raises
    `ProtocolError` if the other host is on another kind of device, `SettingsError` or
    `CacheRankLostError` as `NcclWire` and `prepare_nccl` do.
    """
    num_wires = 2 if device.type == "cuda" else 0
    if end != INFERENCE_END and len(places) != num_wires:
        raise ProtocolError(f"{len(places)} places to meet came, and {num_wires} are needed")
    if not num_wires:
        return ()
    prepare_nccl(interface)
    is_near, wires = end == INFERENCE_END, list[NcclWire]()
    try:
        for goes_outward in (True, False):
            sends = goes_outward == is_near
            wires.append(
                NcclWire(
                    end, device, sends=sends, timeout_s=timeout_s, most_ctas=most_ctas(num_sharing)
                )
            )
    except BaseException:
        break_wires(tuple(wires), "the two hosts do not meet")
        raise
    return tuple(wires)


def most_ctas(num_sharing: int) -> int:
    """Return what each of `num_sharing` transfers of one GPU may take of it.

    `MOST_CTAS` in all, but one at least; a power of two, because NCCL rounds up to one.
    """
    return 1 << (max(1, MOST_CTAS // num_sharing).bit_length() - 1)


def break_wires(wires: Wires, reason: str) -> None:
    """Abort `wires`, which nobody uses yet."""
    for wire in wires:
        wire.abort(reason)
