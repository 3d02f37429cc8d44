# SPDX-License-Identifier: Apache-2.0
"""No policy counts on more prompt queries than it is handed."""

from __future__ import annotations

from typing import Any

import pytest

from tandemkv.cache_rank.policies.base import PolicyError


@pytest.mark.parametrize(("policy", "option"), [("sfi", {"window": 65}), ("lfps", {"rows": 65})])
def test_more_queries_than_are_handed_over_are_refused(
    policy: str, option: dict[str, int], make_bench: Any
) -> None:
    make_bench(policy, options=option, seed_window=65)
    with pytest.raises(PolicyError, match=r"=65: the last 64 queries .* raise --seed-window"):
        make_bench(policy, options=option)
