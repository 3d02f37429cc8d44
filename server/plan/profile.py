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


class Line(_Model):
    """Time of an operation: a fixed part, and bytes over a bandwidth (bytes per second)."""

    fixed_us: Microseconds
    bandwidth: Bandwidth


class Measured(_Model):
    """What was timed. Times are in us, bandwidths in bytes per second.

    Attributes
    ----------
    attention_by : {"flashinfer", "tandemkv"}
        Whose kernel attended.
    copy_bandwidth : float
        Within the GPU's memory, bytes read and written together.
    weight_bandwidth : float
        Reading matrices in products with a few tokens.
    layer_us, request_layer_us : float
        A layer without weights and attention, and what each request adds to it: torch operations
        of a layer's shape stand for SGLang's.
    attention, scan_int4, topk : Line
        Over K and V, keys of the index, and 4 bytes for each key that is chosen from.
    scan_native, scan_int8, samples_bandwidth : float
        With the fixed part of `scan_int4`, and of the cost model.
    predict_us : float
        A predicted query without the reading of its matrix.
    gather_us : float
        Difference to what is resident, and copy of the rows that are missing.
    host_bandwidth, peer_bandwidth : float, optional
        From pinned host memory, and from the second GPU, to the first.
    """

    attention_by: Literal["flashinfer", "tandemkv"]
    copy_bandwidth: Bandwidth
    weight_bandwidth: Bandwidth
    layer_us: Microseconds
    request_layer_us: Microseconds
    attention: Line
    scan_int4: Line
    scan_native: Bandwidth
    scan_int8: Bandwidth
    topk: Line
    predict_us: Microseconds
    gather_us: Microseconds
    samples_bandwidth: Bandwidth
    host_bandwidth: Bandwidth | None = None
    peer_bandwidth: Bandwidth | None = None


class MachineProfile(_Model):
    """A measurement as it is kept."""

    schema_version: Literal[1] = 1
    machine: Machine
    taken_at: Text
    measured: Measured

    @property
    def origin(self) -> str:
        """Whose constants these are, for a sentence."""
        return f"this machine ({self.machine.gpu}, measured {self.taken_at})"

    def constants(self) -> CostConstants:
        """Return the cost model's constants: what was measured, and the rest of one H200."""
        return replace(H200, **_measured_constants(self.measured), origin=self.origin)

    def kept(self) -> tuple[str, ...]:
        """Names of the constants that stay an H200's: they cannot be timed by themselves."""
        measured = _measured_constants(self.measured)
        return tuple(f.name for f in fields(H200) if f.name not in measured and f.name != "origin")

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield what a person reads: a name, and a value with its unit."""
        found = self.measured

        def line(value: Line) -> str:
            return f"{value.fixed_us:.1f} us + {_gb(value.bandwidth)}"

        yield "copy within memory, read and written", _gb(found.copy_bandwidth)
        yield "reading of weights", _gb(found.weight_bandwidth)
        each = f"{found.layer_us:.1f} us + {found.request_layer_us:.2f} us a request"
        yield "a layer without weights and attention (stand-in)", each
        yield f"decode attention ({found.attention_by})", line(found.attention)
        yield "scan of keys, int4", line(found.scan_int4)
        yield "scan of keys, int8", _gb(found.scan_int8)
        yield "scan of keys, native", _gb(found.scan_native)
        yield "choice of the best keys", line(found.topk)
        yield "predicted query", f"{found.predict_us:.1f} us"
        yield "resident set: difference and rows", f"{found.gather_us:.1f} us"
        yield "attention to samples", _gb(found.samples_bandwidth)
        if found.host_bandwidth is not None:
            yield "pinned host memory to GPU (nothing is placed by it)", _gb(found.host_bandwidth)
        peer = found.peer_bandwidth
        yield "second GPU to first", "not measured" if peer is None else _gb(peer)


def _gb(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.0f} GB/s"


def _measured_constants(found: Measured) -> dict[str, float]:
    constants = {
        "weight_bandwidth": found.weight_bandwidth,
        "layer_overhead_us": found.layer_us,
        "request_layer_us": found.request_layer_us,
        "attention_fixed_us": found.attention.fixed_us,
        "attention_bandwidth": found.attention.bandwidth,
        "scan_fixed_us": found.scan_int4.fixed_us,
        "scan_bandwidth_native": found.scan_native,
        "scan_bandwidth_int8": found.scan_int8,
        "scan_bandwidth_int4": found.scan_int4.bandwidth,
        "topk_fixed_us": found.topk.fixed_us,
        "topk_bandwidth": found.topk.bandwidth,
        "selection_fixed_us": found.predict_us,
        "gather_us": found.gather_us,
        "samples_bandwidth": found.samples_bandwidth,
    }
    if found.peer_bandwidth is not None:
        constants["exchange_bandwidth"] = found.peer_bandwidth
        # Of several nothing is timed: where they share a bus they bring no more than one.
        constants["receive_bandwidth"] = found.peer_bandwidth
    return constants
