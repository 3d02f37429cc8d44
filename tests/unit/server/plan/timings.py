# SPDX-License-Identifier: Apache-2.0
"""Times of a machine that has given constants, in place of timing one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandemkv.server.evaluation.provenance import Gpu
from tandemkv.server.plan.cost import CostConstants
from tandemkv.server.plan.measure import Timed, take_measurements
from tandemkv.server.plan.profile import Machine, MachineProfile

A100 = Gpu(name="NVIDIA A100-SXM4-80GB", count=2, memory_bytes=80 << 30, driver="570.1")
_KV_BYTES, _REQUESTS, _HEADS = 2 * 8 * 128 * 2, 8, 8
_KEY_BYTES = {"native": 256, "int8": 132, "int4": 72}


@dataclass(frozen=True)
class MachineOf:
    """`DeviceTimings` of a machine whose constants are `cost`."""

    cost: CostConstants
    has_peer: bool = True
    attention_by: Literal["flashinfer", "tandemkv"] = "flashinfer"

    def copy(self) -> Timed:
        return Timed(1e9, 500.0)

    def weights(self) -> Timed:
        return _read(1e9, self.cost.weight_bandwidth)

    def layer(self, batch: int) -> Timed:
        fixed = self.cost.layer_overhead_us + batch * self.cost.request_layer_us
        return _read(4e8, self.cost.weight_bandwidth, fixed)

    def attention(self, tokens: int) -> Timed:
        size = _REQUESTS * tokens * _KV_BYTES
        return _read(size, self.cost.attention_bandwidth, self.cost.attention_fixed_us)

    def scan(self, index_dtype: str, tokens: int) -> Timed:
        size = _REQUESTS * tokens * _HEADS * _KEY_BYTES[index_dtype]
        return _read(size, self.cost.scan_bandwidth(index_dtype), self.cost.scan_fixed_us)

    def select(self, tokens: int) -> Timed:
        size = 4 * _REQUESTS * tokens * _HEADS
        scan = self.scan("int4", tokens).us
        return _read(size, self.cost.topk_bandwidth, self.cost.topk_fixed_us + scan)

    def predict(self) -> Timed:
        return _read(3e7, self.cost.weight_bandwidth, self.cost.selection_fixed_us)

    def gather(self) -> Timed:
        return Timed(0, self.cost.gather_us)

    def samples(self, count: int) -> Timed:
        size = _REQUESTS * count * _KV_BYTES
        return _read(size, self.cost.samples_bandwidth, self.cost.samples_fixed_us)

    def host_copy(self) -> Timed | None:
        return Timed(1e9, 2e4)

    def peer_copy(self) -> Timed | None:
        if not self.has_peer:
            return None
        return _read(1e9, self.cost.exchange_bandwidth)


def _read(num_bytes: float, bandwidth: float, fixed_us: float = 0.0) -> Timed:
    return Timed(num_bytes, fixed_us + num_bytes / bandwidth * 1e6)


def profile_of(cost: CostConstants, *, has_peer: bool = True) -> MachineProfile:
    """Return the profile that measuring such a machine, with an A100, gives."""
    measured = take_measurements(MachineOf(cost, has_peer), lambda _: None)
    return MachineProfile(machine=Machine.of(A100), taken_at="2026-01-31", measured=measured)
