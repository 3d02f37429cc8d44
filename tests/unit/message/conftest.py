# SPDX-License-Identifier: Apache-2.0
"""What tests of link `message` share."""

from __future__ import annotations

import pytest
from tape import play_graphs


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a direction works: as between CPUs, between GPUs, or there with steps prepared."""
    name: str = request.param
    if name == "captured":
        play_graphs(monkeypatch)
    return name
