# SPDX-License-Identifier: Apache-2.0
"""Take a machine's profile: which operations are timed, and what is made of the times.

How they are timed is `DeviceTimings`' part, so that what follows from a time needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tandemkv.cache_rank.protocol.errors import TandemKVError

from .profile import Measured

if TYPE_CHECKING:
    from .device_timings import DeviceTimings

LENGTHS = (32768, 65536)
"""Tokens of each of eight requests whose keys are scanned. Attention is timed with a quarter."""
SAMPLES = (128, 1024)
LAYER_BATCHES = (1, 8)


class ProfileError(TandemKVError):
    """A machine could not be measured, or what was measured of it cannot be used."""


class Line(NamedTuple):
    """Time of an operation: a fixed part in us, and bytes over a bandwidth (bytes per second)."""

    fixed_us: float
    bandwidth: float


class Timed(NamedTuple):
    """Bytes that an operation reads (a copy: reads and writes), and how long it took, in us."""

    num_bytes: float
    us: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.num_bytes / self.us * 1e6


def take_measurements(timings: DeviceTimings, progress: Callable[[str], None]) -> Measured:
    """Time everything, and derive what the cost model needs.

    Raises `ProfileError` if times contradict each other, as they do when something else uses the
    GPU.
    """
    progress("memory, weights and a layer")
    copy, weights = timings.copy(), timings.weights()
    layer_us, request_us = _layer(timings, weights.bandwidth)
    progress("attention")
    attention = _line("attention", [timings.attention(tokens // 4) for tokens in LENGTHS])
    samples = _line("attention to samples", [timings.samples(count) for count in SAMPLES])
    progress("scans and choice of keys")
    scans = [timings.scan("int4", tokens) for tokens in LENGTHS]
    scan = _line("the scan of int4 keys", scans)
    choices = [timings.select(tokens) for tokens in LENGTHS]
    topk = _line(
        "the choice of keys",
        [Timed(c.num_bytes, c.us - s.us) for c, s in zip(choices, scans, strict=True)],
    )
    native, int8 = (
        _beyond(name, timings.scan(name, LENGTHS[-1]), scan.fixed_us) for name in ("native", "int8")
    )
    progress("resident sets and transfers")
    predict = timings.predict()
    host, peer = timings.host_copy(), timings.peer_copy()
    return Measured(
        attention_by=timings.attention_by,
        copy_bandwidth=copy.bandwidth,
        weight_bandwidth=weights.bandwidth,
        layer_overhead_us=layer_us,
        request_layer_us=request_us,
        attention_fixed_us=attention.fixed_us,
        attention_bandwidth=attention.bandwidth,
        scan_fixed_us=scan.fixed_us,
        scan_bandwidth_int4=scan.bandwidth,
        scan_bandwidth_native=native,
        scan_bandwidth_int8=int8,
        topk_fixed_us=topk.fixed_us,
        topk_bandwidth=topk.bandwidth,
        selection_fixed_us=max(0.0, predict.us - predict.num_bytes / weights.bandwidth * 1e6),
        gather_us=timings.gather().us,
        samples_bandwidth=samples.bandwidth,
        host_bandwidth=None if host is None else host.bandwidth,
        exchange_bandwidth=None if peer is None else peer.bandwidth,
    )


def _layer(timings: DeviceTimings, bandwidth: float) -> tuple[float, float]:
    """Return what a layer takes beside its weights, and what each request adds, in us."""
    (few, short), (many, long) = ((n, timings.layer(n)) for n in LAYER_BATCHES)
    request_us = max(0.0, (long.us - short.us) / (many - few))
    rest_us = short.us - short.num_bytes / bandwidth * 1e6 - few * request_us
    return max(0.0, rest_us), request_us


def _line(name: str, points: list[Timed]) -> Line:
    """Lay a line through two points; what begins below zero begins at zero."""
    first, second = points
    if not second.us > first.us > 0:
        raise ProfileError(
            f"{name} took {first.us:.1f} us, and {second.us:.1f} us with "
            f"{second.num_bytes / first.num_bytes:.2g} times the bytes: something else uses this "
            "GPU, or its clock changed; run --measure again on an idle GPU"
        )
    bandwidth = (second.num_bytes - first.num_bytes) / (second.us - first.us) * 1e6
    fixed_us = first.us - first.num_bytes / bandwidth * 1e6
    if fixed_us < 0:
        return Line(fixed_us=0.0, bandwidth=second.bandwidth)
    return Line(fixed_us=fixed_us, bandwidth=bandwidth)


def _beyond(name: str, timed: Timed, fixed_us: float) -> float:
    """Return the bandwidth of what a scan takes beyond its fixed part."""
    if timed.us <= fixed_us:
        raise ProfileError(
            f"the scan of {name} keys took {timed.us:.1f} us, less than the fixed part of one of "
            f"int4 keys, {fixed_us:.1f} us: run --measure again on an idle GPU"
        )
    return timed.num_bytes / (timed.us - fixed_us) * 1e6
