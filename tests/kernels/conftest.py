# SPDX-License-Identifier: Apache-2.0
"""What is different where Triton is interpreted (`own_process`)."""

from __future__ import annotations

import pytest
from own_process import is_interpreted, is_of_pairs
from pairs import with_every_pair


def pytest_configure() -> None:
    """Mend the interpreter before any case imports kernels."""
    if is_interpreted():
        from interpreting import mend_interpreter

        mend_interpreter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations whose parameters are all met, two by two, in others."""
    if not is_of_pairs():
        return
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for same in by_test.values() for item in with_every_pair(same)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
