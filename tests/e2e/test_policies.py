# SPDX-License-Identifier: Apache-2.0
"""Every policy over HTTP, by each link to the engine."""

from __future__ import annotations

import os
from pathlib import Path

import own_policy
import pytest
from policies import (
    LINKS,
    NEW_TOKENS,
    SMALL,
    generate,
    judge,
    on_link,
)
from rank_servers import ours
from workbench import Checks

from tandemkv.cache_rank.policies.registry import POLICIES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_NEWEST_FIRST = "own_policy:NewestFirst"


def environment_of(tmp_path: Path) -> dict[str, str]:
    """Let servers import the policies of `own_policy`, and note what is called."""
    paths = (str(Path(own_policy.__file__).parent), os.environ.get("PYTHONPATH"))
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OWN_POLICY_LOG": str(tmp_path / "calls"),
    }


@pytest.mark.parametrize("cache_ranks", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_policy_outside_of_the_package(
    cache_ranks: int, token_ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(own_policy.__file__).parent))
    tree = {
        "cache_ranks": cache_ranks,
        "selection": {"policy": _NEWEST_FIRST, **SMALL},
        "policy_options": {_NEWEST_FIRST: {"skip": 3}},
    }
    with ours(tree, environ=environment_of(tmp_path)) as server:
        generate(server, token_ids)
        inference, _ = server.values()
    assert inference["sparse_rows_total"] == NEW_TOKENS - 1
    calls = (tmp_path / "calls").read_text().split("\n")
    # 28 of 30 layers are not exact; what is measured at start is more.
    assert calls.count("seed_scores") >= 28
    assert calls.count("select") >= 28 * (NEW_TOKENS - 1)


@pytest.mark.slow  # in CI test_policy_runs, without HTTP
def test_slow_steps_attend_to_everything(token_ids: list[int]) -> None:
    """Of a period of four: every fourth step, and the first."""
    selection, options = {"policy": "sync_kv", **SMALL}, {"sync_kv": {"stride": 4}}
    with ours({"cache_ranks": 0, "selection": selection, "policy_options": options}) as server:
        generate(server, token_ids)
        values, _ = server.values()
    slow = [step for step in range(NEW_TOKENS - 1) if step % 4 == 0]
    assert values["slow_rows_total"] == len(slow)
    assert values["selections_total"] == len(slow) * 28
    fast = (NEW_TOKENS - 1 - len(slow)) * (4 + 96 + 16)
    assert values["attended_tokens_total"] == fast + sum(801 + step for step in slow)
    assert values["fetched_rows_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_links_give_the_same_answers(policy: str, token_ids: list[int]) -> None:
    checks = Checks()
    judge(checks, policy, {link: on_link(policy, link, token_ids) for link in LINKS})
    result = checks.result()
    assert result["pass"], result
