# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for GPUs that are not here, and fits; run by `test_triton_targets`."""

from __future__ import annotations

import pytest
from compiled_for import TARGETS, Target, check_launch, compiling_for, launched_kernels
from product_launches import LAUNCHES, OF_EACH_KERNEL, TIGHT, Launch

IDS = [f"sm_{target.capability}" for target in TARGETS]
LEAST_SHARED = min(TARGETS, key=lambda target: target.shared_bytes)


@pytest.mark.parametrize("target", TARGETS, ids=IDS)
@pytest.mark.parametrize("name", OF_EACH_KERNEL)
def test_each_kernel_compiles_and_fits(name: str, target: Target) -> None:
    check_launch(LAUNCHES[name], target)


@pytest.mark.parametrize("name", TIGHT)
def test_what_needs_most_shared_memory_fits_where_there_is_least(name: str) -> None:
    check_launch(LAUNCHES[name], LEAST_SHARED)


@pytest.mark.parametrize("target", TARGETS, ids=IDS)
def test_no_kernel_is_forgotten(target: Target) -> None:
    with compiling_for(target, compiles=False) as listed:
        for name in OF_EACH_KERNEL:
            LAUNCHES[name](target.device)
    assert {name for name, _ in listed} == launched_kernels()


def test_kernels_are_chained_where_that_is_possible() -> None:
    launch: Launch = LAUNCHES["mirror"]
    for target in TARGETS:
        with compiling_for(target) as compiled:
            launch(target.device)
        (found,) = compiled
        assert found.kernel.metadata.launch_pdl == (target.capability >= 90)
        assert ("griddepcontrol" in found.kernel.asm["ptx"]) == (target.capability >= 90)
