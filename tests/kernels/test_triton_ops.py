# SPDX-License-Identifier: Apache-2.0
"""Run the cases that are not about scores (`own_process`), and all combinations of parameters."""

from pathlib import Path

import pytest
from own_process import OTHERS, SCORES, run_cases

pytest.importorskip("triton")


@pytest.mark.timeout(900)  # interpreted, minutes on a busy core
def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases(*OTHERS, cache_dir=tmp_path)


@pytest.mark.slow  # in CI tests run every pair of parameters
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*OTHERS, *SCORES])
def test_every_combination_equals_the_references(name: str, tmp_path: Path) -> None:
    run_cases(name, cache_dir=tmp_path, is_whole=True)
