# SPDX-License-Identifier: Apache-2.0
"""Run `triton_cases.py` (`own_process`)."""

from pathlib import Path

import pytest
from own_process import run_cases

pytest.importorskip("triton")


def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases("triton_cases.py", tmp_path)
