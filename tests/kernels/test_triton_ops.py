# SPDX-License-Identifier: Apache-2.0
"""Run `triton_cases.py` (`own_process`), and all combinations of parameters of every such file."""

from pathlib import Path

import pytest
from own_process import run_cases

pytest.importorskip("triton")
CASES = sorted(
    path.name
    for path in Path(__file__).parent.glob("triton_*cases.py")
    if "targets" not in path.name
)


@pytest.mark.timeout(900)  # interpreted, minutes on a busy core
def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases("triton_cases.py", tmp_path)


@pytest.mark.slow  # in CI each file has a test that runs every pair of parameters
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_every_combination_equals_the_references(name: str, tmp_path: Path) -> None:
    run_cases(name, tmp_path, is_whole=True)
