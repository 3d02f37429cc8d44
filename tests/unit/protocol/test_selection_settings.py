# SPDX-License-Identifier: Apache-2.0
"""Samples and rows among the settings: how many there are, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tandemkv.cache_rank.policies.registry import resolve_selection


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({}, 1024),
        ({"policy": "oracle"}, 1024),
        ({"budget_tokens": 895}, 768),
        ({"budget_tokens": 256}, 256),
        ({"budget_tokens": 255}, 128),
        ({"policy": "async_spade"}, 0),
        ({"policy": "streaming"}, 0),
        ({"budget_tokens": 128}, 128),
        ({"budget_tokens": 127}, 0),
        ({"budget_tokens": 72, "sample_tokens": 16}, 16),
        ({"policy": "async_spade", "sample_tokens": 64}, 64),
        ({"sample_tokens": 0}, 0),
    ],
)
def test_samples_by_default_and_on_demand(given: dict[str, object], samples: int) -> None:
    settings = resolve_selection(given)
    assert settings.num_samples == samples
    most = settings.num_resident + settings.num_recent_tokens + samples
    assert settings.row_tokens == most


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sample_tokens": 3}, "sample_tokens=3 must be even, or 0 for none"),
        ({"sample_tokens": 1026}, "less than or equal to 1024"),
        ({"sample_tokens": -2}, "greater than or equal to 0"),
        ({"policy": "streaming", "sample_tokens": 16}, "use --sample-tokens 0"),
        ({"policy": "lfps", "sample_tokens": 16}, "use --sample-tokens 0"),
        ({"policy": "kascade", "predictor_dtype": "int8"}, "or drop --predictor-dtype"),
        ({"policy": "kascade", "late_layers": 1}, "or drop --late-layers"),
        ({"dense_while_fits": False, "dense_batch_tokens": 9}, "sets would not fill meanwhile"),
    ],
)
def test_what_is_refused_says_what_to_do(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        resolve_selection(given)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"budget_tokens": 2048}, 1024),
        ({"budget_tokens": 126, "sample_tokens": 0}, 64),  # half would be 63
        ({"budget_tokens": 70, "sample_tokens": 0}, 64),
        ({"budget_tokens": 20, "num_recent_tokens": 8, "sample_tokens": 0}, 20),
        ({"budget_tokens": 158, "policy": "sfi"}, 158),
        ({"budget_tokens": 158, "fetch_cap": 9}, 9),
    ],
)
def test_rows_fetched_at_most(given: dict[str, object], rows: int) -> None:
    assert resolve_selection(given).fetch_cap_tokens == rows


def test_no_more_rows_are_fetched_than_are_resident() -> None:
    """A kernel is made for that many: 65536 take minutes to compile."""
    found = resolve_selection({"budget_tokens": 158, "fetch_cap": 65536, "sample_tokens": 0})
    assert found.fetch_cap_tokens == found.num_resident


@pytest.mark.parametrize(
    ("factor", "budget", "resident"), [(1.15, 100, 115), (1.3, 70, 91), (1.5, 77, 115)]
)
def test_a_resident_set_holds_c_times_k_tokens(factor: float, budget: int, resident: int) -> None:
    """Though 1.15 times 100 is a little less than 115; what is less by a part of one is cut."""
    given = {"resident_factor": factor, "budget_tokens": budget, "sample_tokens": 0}
    found = resolve_selection(given)
    assert found.num_resident == found.num_sink_tokens + resident
