# SPDX-License-Identifier: Apache-2.0
"""Every variant of every kernel for every target; run by `test_triton_targets`, slow."""

from __future__ import annotations

import pytest
from compiled_for import TARGETS, Target, check_launch
from product_launches import LAUNCHES


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target.capability}")
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_and_fits(name: str, target: Target) -> None:
    check_launch(LAUNCHES[name], target)
