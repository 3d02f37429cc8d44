# SPDX-License-Identifier: Apache-2.0
"""What ``tandemkv doctor`` says of the GPUs that torch sees; nothing where there is none."""

from __future__ import annotations

import os
import shutil
from itertools import combinations

import torch

from tandemkv.server.checks.shared_gpus import are_peers, mps_directory, runs_mps
from tandemkv.server.evaluation.provenance import visible_gpu
from tandemkv.server.plan.constants import ADVICE, read_profile
from tandemkv.server.plan.footprint import GIB
from tandemkv.server.plan.measure import ProfileError
from tandemkv.server.plan.profile import Machine

from .finding import Finding

RAN, COMPILED = frozenset({(9, 0)}), frozenset({(8, 9), (8, 0)})
"""Compute capabilities on which the kernels ran, and those for which they only compile: the table
"Which GPUs" of docs/launch.md."""


def check_gpus() -> list[Finding]:
    """Look at every GPU, at what they can do together, and at what compiles and predicts."""
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return []
    count = torch.cuda.device_count()
    findings = [check_gpu(index) for index in range(count)]
    if count > 1:
        findings.append(check_peers(count))
    return [*findings, check_mps(), check_compiler(), check_profile()]


def check_gpu(index: int) -> Finding:
    """Look at a GPU: its name, memory and compute capability, and the driver."""
    properties = torch.cuda.get_device_properties(index)
    capability = torch.cuda.get_device_capability(index)
    gpu, name = visible_gpu(), f"gpu {index}"
    driver = "unknown" if gpu is None else gpu.driver
    number = ".".join(map(str, capability))
    text = (
        f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, capability {number}, driver "
        f"{driver}"
    )
    if capability in RAN:
        return Finding(name, "ok", text)
    state = "compile and never ran" if capability in COMPILED else "were not tried"
    advice = f"the kernels {state} on capability {number}: compare answers and times first"
    return Finding(name, "warn", text, f"{advice} (docs/launch.md, Check)")


def check_peers(count: int) -> Finding:
    """Look whether the GPUs can access the memory of each other."""
    apart = [pair for pair in combinations(range(count), 2) if not are_peers(*pair)]
    if not apart:
        return Finding("peer access", "ok", f"between all {count} GPUs")
    text = "none between " + ", ".join(f"{one} and {other}" for one, other in apart)
    advice = (
        "a cache rank on a GPU of its own needs it: use --cache-ranks 0, or name GPUs that have it "
        "in CUDA_VISIBLE_DEVICES"
    )
    return Finding("peer access", "warn", text, advice)


def check_mps() -> Finding:
    """Say whether CUDA MPS runs; only messages between GPUs need it."""
    if runs_mps():
        return Finding("CUDA MPS", "ok", f"runs, in {mps_directory()}")
    return Finding("CUDA MPS", "ok", "does not run; only --transport message on GPUs needs it")


def check_compiler() -> Finding:
    """Look for what Triton compiles the start of its kernels with."""
    names = [named] if (named := os.environ.get("CC")) else ["gcc", "clang"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        advice = "Triton needs one for every kernel: install gcc, or name one in CC"
        return Finding("C compiler", "fail", f"no {' or '.join(names)}", advice)
    return Finding("C compiler", "ok", found)


def check_profile() -> Finding:
    """Look for the constants of this machine, with which times are predicted."""
    gpu = visible_gpu()
    try:
        profile = None if gpu is None else read_profile(Machine.of(gpu))
    except ProfileError as error:
        return Finding("profile", "warn", str(error), ADVICE)
    if profile is not None:
        return Finding("profile", "ok", f"measured {profile.taken_at}")
    text = "none: times are predicted with constants of one H200"
    if gpu is not None and "H200" in gpu.name:
        return Finding("profile", "ok", text)
    return Finding("profile", "warn", text, ADVICE)
