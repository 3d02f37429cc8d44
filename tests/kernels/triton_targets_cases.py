# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for GPUs that are not here, and fits; run by `test_triton_targets`."""

from __future__ import annotations

import pytest
from compiled_for import TARGETS, Target, compiling_for, launched_kernels
from product_launches import LAUNCHES, Launch

IDS = [f"sm_{target.capability}" for target in TARGETS]


@pytest.mark.parametrize("target", TARGETS, ids=IDS)
@pytest.mark.parametrize("launch", LAUNCHES, ids=[launch.name for launch in LAUNCHES])
def test_compiles_and_fits_into_shared_memory(launch: Launch, target: Target) -> None:
    with compiling_for(target) as compiled:
        launch.run(target.device)
    assert compiled
    for name, kernel in compiled:
        assert kernel.metadata.target.arch == target.capability
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= target.shared_bytes, name
        # Kernels wait for one another's end by instructions that only Hopper and later have.
        assert ("griddepcontrol" in kernel.asm["ptx"]) <= (target.capability >= 90), name


@pytest.mark.parametrize("target", TARGETS, ids=IDS)
def test_no_kernel_is_forgotten(target: Target) -> None:
    with compiling_for(target, compiles=False) as listed:
        for launch in LAUNCHES:
            launch.run(target.device)
    assert {name for name, _ in listed} == launched_kernels()


def test_kernels_are_chained_where_that_is_possible() -> None:
    launch = next(launch for launch in LAUNCHES if launch.name == "mirror")
    for target in TARGETS:
        with compiling_for(target) as compiled:
            launch.run(target.device)
        (found,) = compiled
        assert found.kernel.metadata.launch_pdl == (target.capability >= 90)
        assert ("griddepcontrol" in found.kernel.asm["ptx"]) == (target.capability >= 90)
