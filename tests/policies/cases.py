# SPDX-License-Identifier: Apache-2.0
"""The policies that go through the contract tests, one list."""

POLICY_CASES = [
    ("look_ahead", {}),
    ("oracle", {}),
    ("quest", {}),
    ("quest", {"pooling": "max_logit", "options": {"page_tokens": 5}}),
    ("kascade", {"anchors": (0,)}),
    ("kascade", {"anchors": (0, 1), "options": {"fraction": 1.0}}),
    ("sfi", {}),
    ("sfi", {"options": {"nms_radius": 3, "temperature": 0.5, "lambda_clip": 1.0}}),
    ("sync_kv", {}),
    ("sync_kv", {"options": {"static": 0.0}}),
    ("last_query", {}),
    ("mean_query", {}),
    ("mean_query", {"options": {"unrotate": False}}),
    ("async_spade", {}),
    ("async_spade", {"options": {"window": 1}}),
    ("async_spade", {"pool_before": 3}),
    ("kascade", {"anchors": (0,), "pool_before": 1, "pool_after": 1}),
    ("sfi", {"pool_before": 1, "pool_after": 1}),
    ("sync_kv", {"pool_before": 1, "pool_after": 1}),
    ("async_spade", {"options": {"sign": -1, "unrotate": False}}),
    ("async_spade", {"options": {"normalise": "none", "eps": 0.0}}),
]
"""Policies that select, and changes to the settings."""

UNSELECTIVE = ["streaming", "exact"]
