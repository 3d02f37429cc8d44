# SPDX-License-Identifier: Apache-2.0
"""What an inference rank refuses at its start, and how long it waits for an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.start.local import check_sizes
from tandemkv.inference_rank.start.shared import _place, wait_limit_s

_ONE = {"link": "shared", "model_device": "cuda"}
_APART = _ONE | {"two_gpus": True}


def _settings(policy: str, placement: dict[str, object]) -> RankSettings:
    return RankSettings.model_validate(
        {"selection": selection_values({"policy": policy}), "placement": placement}
    )


@pytest.mark.parametrize(
    ("policy", "placement", "is_refused"),
    [
        ("sfi", _ONE, False),
        ("sfi", _APART, False),
        ("sync_kv", _APART, False),
        ("sfi", _APART | {"model_device": "cpu"}, False),
        ("sfi", _APART | {"link": "message"}, True),
        ("sfi", _APART | {"link": "message", "model_device": "cpu"}, False),
        ("lfps", _APART, True),
        ("lfps", _ONE | {"host_engine": True}, False),
    ],
)
def test_who_attends_to_what_is_not_resident(
    policy: str, placement: dict[str, object], is_refused: bool
) -> None:
    runner = SimpleNamespace(page_size=1, max_total_num_tokens=1 << 20)
    settings = _settings(policy, placement)
    if not is_refused:
        check_sizes(runner, settings)
        return
    with pytest.raises(SettingsError, match=rf"policy={policy} attends to .*use --cache-ranks 0"):
        check_sizes(runner, settings)


@pytest.mark.parametrize(
    ("policy", "placement", "limit_s"),
    [
        ("look_ahead", _APART, 4.0),
        ("sfi", _APART, 60.0),
        ("own_policy:WorstFirst", _ONE, 60.0),
        ("lfps", _ONE | {"host_engine": True}, 60.0),
    ],
)
def test_an_engine_whose_host_launches_each_kernel_is_given_time(
    policy: str, placement: dict[str, object], limit_s: float
) -> None:
    """As long as it may be busy with a step; else as long as it may be silent, and a second."""
    assert wait_limit_s(_settings(policy, placement)) == limit_s


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        ({"link": "message", "two_gpus": True}, "by messages"),
        ({"link": "shared"}, "in shared memory"),
        ({"link": "shared", "two_gpus": True}, "in shared memory, on a second GPU"),
        (
            {"link": "shared", "two_gpus": True, "head_shards": 2},
            "in shared memory, on GPUs of their own",
        ),
    ],
)
def test_status_says_where_the_cache_rank_is(placement: dict[str, object], told: str) -> None:
    settings = RankSettings.model_validate({"placement": placement})
    assert _place(settings) == f"a process of its own, {told}"
