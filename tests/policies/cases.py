# SPDX-License-Identifier: Apache-2.0
"""The policies that go through the contract tests, one list."""

POLICY_CASES = [
    ("look_ahead", {}),
    ("oracle", {}),
    ("quest", {}),
    ("quest", {"pooling": "max_logit", "quest_page_tokens": 5}),
    ("kascade", {"anchors": (0,)}),
    ("kascade", {"anchors": (0, 1), "kascade_fraction": 1.0}),
    ("sfi", {}),
    ("sfi", {"sfi_nms_radius": 3, "sfi_temperature": 0.5, "sfi_lambda_clip": 1.0}),
    ("sync_kv", {}),
    ("sync_kv", {"sync_static": 0.0}),
    ("last_query", {}),
    ("mean_query", {}),
    ("mean_query", {"ridge_unrotate": False}),
    ("async_spade", {}),
    ("async_spade", {"ridge_window": 1}),
    ("async_spade", {"pool_before": 3}),
    ("kascade", {"anchors": (0,), "pool_before": 1, "pool_after": 1}),
    ("sfi", {"pool_before": 1, "pool_after": 1}),
    ("sync_kv", {"pool_before": 1, "pool_after": 1}),
    ("async_spade", {"ridge_sign": -1, "ridge_unrotate": False}),
    ("async_spade", {"ridge_normalise": "none", "ridge_eps": 0.0}),
]
"""Policies that select, and changes to the settings."""

UNSELECTIVE = ["streaming", "exact"]
