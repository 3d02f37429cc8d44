# SPDX-License-Identifier: Apache-2.0
"""The policy that docs/policies.md shows, and what is said of one that is not found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.policies.base import PolicyError
from tandemkv.cache_rank.policies.registry import find_policy

PAGE = Path(__file__).resolve().parents[2] / "docs/policies.md"


def test_example_of_the_page(
    make_bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## A policy of your own\n")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    (tmp_path / "newest.py").write_text(block[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "newest:NewestFirst"
    bench = make_bench(name, options={"skip": 2})
    request = bench.request(torch.zeros(2, 4, 16))
    chosen = bench.policy.select(request).positions
    for row, end in enumerate(request.hi.tolist()):
        newest = torch.arange(end - 3, end - 3 - request.budget, -1)
        assert (chosen[row] == newest.where(newest >= request.lo[row], -1)).all()


def test_a_module_that_python_does_not_see() -> None:
    with pytest.raises(PolicyError, match=r"unseen'; put its folder into PYTHONPATH"):
        find_policy("unseen:Class")
    with pytest.raises(PolicyError, match=r"no attribute 'Class'$"):
        find_policy("json:Class")
