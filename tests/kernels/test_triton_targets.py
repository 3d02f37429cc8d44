# SPDX-License-Identifier: Apache-2.0
"""Run `triton_targets_cases.py` in a process of its own, which compiles and runs nothing."""

import ast
from pathlib import Path

import pytest
from own_process import run_cases

pytest.importorskip("triton")
_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1200)  # minutes, on a core that others use as well
def test_kernels_compile_for_other_gpus(tmp_path: Path) -> None:
    run_cases("triton_targets_cases.py", cache_dir=tmp_path, is_compiled=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_variants_compile_for_other_gpus(tmp_path: Path) -> None:
    run_cases("triton_targets_all_cases.py", cache_dir=tmp_path, is_compiled=True)


def test_kernels_are_where_the_cases_look_for_them() -> None:
    found = set()
    for package in ("server", "inference_rank", "cache_rank", "kernels"):
        for path in (_ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                if any(name.split(".")[0] == "triton" for name in names):
                    found.add(path.relative_to(_ROOT).parent.as_posix())
    assert found == {"kernels/triton_ops"}
