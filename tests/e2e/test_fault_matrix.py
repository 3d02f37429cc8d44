# SPDX-License-Identifier: Apache-2.0
"""Some faults at named points: requests go on with the tokens of an undisturbed run."""

from __future__ import annotations

import pytest
from fault_matrix import campaign, judge, sample
from workbench import Checks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_faults_of_the_cache_rank_lose_nothing() -> None:
    chosen, checks = sample(5), Checks()
    assert len({case.action for case in chosen}) > 1
    judge(checks, chosen, campaign(chosen)["cases"])
    result = checks.result()
    assert result["pass"], result
