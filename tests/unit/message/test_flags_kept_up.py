# SPDX-License-Identifier: Apache-2.0
"""Flags that pumps of GPUs raise seldom, where their numbers wrap around."""

from __future__ import annotations

from dataclasses import replace

import pytest
from two_hosts import EXTEND, Way

from tandemkv.cache_rank.protocol.gpu_flags import word_of


@pytest.mark.parametrize("is_back", [False, True])
def test_flags_that_a_pump_raises_on_the_cache_ranks_host_are_kept_up(is_back: bool) -> None:
    """On the inference rank's host its forward pass keeps up all of them."""
    link, step = Way("queued", "oracle", is_back=is_back), 2**31 + 7
    words, others = (
        link.target.tensors[name] for name in ("to_engine", "to_inference")[:: -1 if is_back else 1]
    )
    others.fill_(5)
    link.receive.begin(replace(EXTEND, step=step), ())
    assert (words == (0 if is_back else word_of(step - 1))).all()
    assert (others == 5).all()
    link.receive.begin(replace(EXTEND, step=step + 1), ())
    assert (words == (0 if is_back else word_of(step - 1))).all(), "once in a while"
    link.receive.abort()
    link.receive.begin(replace(EXTEND, step=step + 2**30), ())
    assert (words == (0 if is_back else word_of(step - 1))).all(), "what is lost stays so"
