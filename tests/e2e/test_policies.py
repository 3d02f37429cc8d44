# SPDX-License-Identifier: Apache-2.0
"""Every policy over HTTP, with the engine in SGLang's process and in one of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import own_policy
import pytest
from rank_servers import Server, ours

from tandemkv.cache_rank.policies.registry import POLICIES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_SMALL = {"budget_tokens": 96, "resident_factor": 1.0, "num_recent_tokens": 16}
_MORE: dict[str, dict[str, Any]] = {
    "kascade": {"anchors": [0, 10, 20]},
    "streaming": {"sample_tokens": 0},
}
_OPTIONS = {"kascade": {"fraction": 0.1}}
_NUM_NEW = 24
_NEWEST_FIRST = "own_policy:NewestFirst"


def generate(server: Server, token_ids: list[int]) -> str:
    """Decode behind 800 tokens, where at most 116 are attended to."""
    found = server.generate(
        input_ids=token_ids[:800],
        sampling_params={"max_new_tokens": _NUM_NEW, "temperature": 0, "ignore_eos": True},
    )
    assert found["meta_info"]["completion_tokens"] == _NUM_NEW
    text: str = found["text"]
    return text


def environment_of(tmp_path: Path) -> dict[str, str]:
    """Let servers import the policies of `own_policy`, and note what is called."""
    return {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(own_policy.__file__).parent), os.environ.get("PYTHONPATH")])
        ),
        "OWN_POLICY_LOG": str(tmp_path / "calls"),
    }


@pytest.mark.parametrize("cache_ranks", [0, 1])
def test_a_policy_outside_of_the_package(
    cache_ranks: int, token_ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(own_policy.__file__).parent))
    tree = {
        "cache_ranks": cache_ranks,
        "selection": {"policy": _NEWEST_FIRST, **_SMALL},
        "policy_options": {_NEWEST_FIRST: {"skip": 3}},
    }
    with ours(tree, environ=environment_of(tmp_path)) as server:
        generate(server, token_ids)
        inference, _ = server.values()
    assert inference["sparse_rows_total"] == _NUM_NEW - 1
    calls = (tmp_path / "calls").read_text().split("\n")
    # 28 of 30 layers are not exact; what is measured at start is more.
    assert calls.count("seed_scores") >= 28
    assert calls.count("select") >= 28 * (_NUM_NEW - 1)


def test_slow_steps_attend_to_everything(token_ids: list[int]) -> None:
    """Of a period of four: every fourth step, and the first."""
    selection, options = {"policy": "sync_kv", **_SMALL}, {"sync_kv": {"stride": 4}}
    with ours({"cache_ranks": 0, "selection": selection, "policy_options": options}) as server:
        generate(server, token_ids)
        values, _ = server.values()
    slow = [step for step in range(_NUM_NEW - 1) if step % 4 == 0]
    assert values["slow_rows_total"] == len(slow)
    assert values["selections_total"] == len(slow) * 28
    fast = (_NUM_NEW - 1 - len(slow)) * (4 + 96 + 16)
    assert values["attended_tokens_total"] == fast + sum(801 + step for step in slow)
    assert values["fetched_rows_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_links_give_the_same_answers(policy: str, token_ids: list[int]) -> None:
    texts = []
    for cache_ranks in (0, 1):
        selection = {"policy": policy, **_SMALL, **_MORE.get(policy, {})}
        tree = {"cache_ranks": cache_ranks, "selection": selection, "policy_options": _OPTIONS}
        with ours(tree) as server:
            texts.append(generate(server, token_ids))
            inference, cache = server.values()
        values = cache | inference
        assert values["sparse_rows_total"] == (0 if policy == "exact" else _NUM_NEW - 1)
        if policy not in ("exact", "streaming", "lfps"):
            assert values["fetched_rows_total"] > 0
    assert texts[0] == texts[1]
