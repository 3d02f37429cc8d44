# SPDX-License-Identifier: Apache-2.0
"""What was measured of a machine, and the constants of the cost model that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from tandemkv.server.evaluation.provenance import Gpu, version_of

from .cost import H200, CostConstants

Text = Annotated[str, Field(min_length=1, max_length=200)]
Microseconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
MISSING = "none"
"""Version of a package that is not installed."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Machine(_Model):
    """What a measurement holds for: the GPU and the software that was timed on it."""

    gpu: Text
    driver: Text
    torch: Text
    sglang: Text
    tandemkv: Text

    @classmethod
    def of(cls, gpu: Gpu) -> Self:
        """Return this machine, with `gpu`."""
        names = ("torch", "sglang", "tandemkv")
        versions = {name: version_of(name) or MISSING for name in names}
        return cls(gpu=gpu.name, driver=gpu.driver, **versions)

    def difference(self, other: Self) -> str:
        """Return what `other` has that this has not, in words; empty if they are the same."""
        own, theirs = self.model_dump(), other.model_dump()
        return ", ".join(f"{k} {theirs[k]} (here {own[k]})" for k in own if own[k] != theirs[k])


class Measured(_Model):
    """What was timed. Times are in us, bandwidths in bytes per second.

    Fields that `CostConstants` has as well are what it has them for; the scans of native and int8
    keys were taken to have the fixed part of that of int4 keys, and samples that of the cost model.

    Attributes
    ----------
    attention_by : {"flashinfer", "tandemkv"}
        Whose kernel attended.
    copy_bandwidth : float
        Within the GPU's memory, bytes read and written together.
    layer_overhead_us, request_layer_us : float
        Torch operations of a layer's shape stand for SGLang's.
    exchange_bandwidth, host_bandwidth : float, optional
        From the second GPU, and from pinned host memory, to the first.
    """

    attention_by: Literal["flashinfer", "tandemkv"]
    copy_bandwidth: Bandwidth
    weight_bandwidth: Bandwidth
    layer_overhead_us: Microseconds
    request_layer_us: Microseconds
    attention_fixed_us: Microseconds
    attention_bandwidth: Bandwidth
    scan_fixed_us: Microseconds
    scan_bandwidth_int4: Bandwidth
    scan_bandwidth_native: Bandwidth
    scan_bandwidth_int8: Bandwidth
    topk_fixed_us: Microseconds
    topk_bandwidth: Bandwidth
    selection_fixed_us: Microseconds
    gather_us: Microseconds
    samples_bandwidth: Bandwidth
    exchange_bandwidth: Bandwidth | None = None
    host_bandwidth: Bandwidth | None = None

    def constants(self) -> dict[str, float]:
        """Return the constants of the cost model that were measured, by name."""
        known = {field.name for field in fields(CostConstants)}
        found = self.model_dump(include=known, exclude_none=True)
        if self.exchange_bandwidth is not None:
            # Of several nothing is timed: where they share a bus they bring no more than one.
            found["receive_bandwidth"] = self.exchange_bandwidth
        return found


class MachineProfile(_Model):
    """A measurement as it is kept."""

    schema_version: Literal[2] = 2
    machine: Machine
    taken_at: Text
    measured: Measured

    @property
    def origin(self) -> str:
        """Whose constants these are, for a sentence."""
        return f"this machine ({self.machine.gpu}, measured {self.taken_at})"

    def constants(self) -> CostConstants:
        """Return the cost model's constants: what was measured, and the rest of one H200."""
        return replace(H200, **self.measured.constants(), origin=self.origin)

    def kept(self) -> tuple[str, ...]:
        """Names of the constants that stay an H200's: they cannot be timed by themselves."""
        measured = self.measured.constants()
        return tuple(f.name for f in fields(H200) if f.name not in measured and f.name != "origin")

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield what a person reads: a name, and a value with its unit."""
        found = self.measured
        attention = _gb(found.attention_bandwidth, found.attention_fixed_us)
        yield "copy within memory, read and written", _gb(found.copy_bandwidth)
        yield "reading of weights", _gb(found.weight_bandwidth)
        each = f"{found.layer_overhead_us:.1f} us + {found.request_layer_us:.2f} us a request"
        yield "a layer without weights and attention (stand-in)", each
        yield f"decode attention ({found.attention_by})", attention
        yield "scan of keys, int4", _gb(found.scan_bandwidth_int4, found.scan_fixed_us)
        yield "scan of keys, int8", _gb(found.scan_bandwidth_int8)
        yield "scan of keys, native", _gb(found.scan_bandwidth_native)
        yield "choice of the best keys", _gb(found.topk_bandwidth, found.topk_fixed_us)
        yield "predicted query", f"{found.selection_fixed_us:.1f} us"
        yield "resident set: difference and rows", f"{found.gather_us:.1f} us"
        yield "attention to samples", _gb(found.samples_bandwidth)
        if found.host_bandwidth is not None:
            yield "pinned host memory to GPU (nothing is placed by it)", _gb(found.host_bandwidth)
        peer = found.exchange_bandwidth
        yield "second GPU to first", "not measured" if peer is None else _gb(peer)


def _gb(bandwidth: float, fixed_us: float | None = None) -> str:
    fixed = "" if fixed_us is None else f"{fixed_us:.1f} us + "
    return f"{fixed}{bandwidth / 1e9:.0f} GB/s"
