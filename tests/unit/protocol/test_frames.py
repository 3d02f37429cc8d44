# SPDX-License-Identifier: Apache-2.0
"""Mutated frames to each decoder: some of the million of ``make acceptance``."""

from __future__ import annotations

import frames
import pytest


@pytest.mark.parametrize("decoder", frames.DECODERS)
def test_a_damaged_frame_is_refused_or_sound(decoder: str) -> None:
    found = frames.fuzz(decoder, round(50_000 * frames.SHARES[decoder]))
    assert found["crashes"] == []
    assert found["descriptors_leaked"] == 0
    assert found["refused"] > 1000
    assert found["accepted"] > 50


def test_a_stranger_is_told_nothing() -> None:
    assert frames.strangers(2000) == 0
