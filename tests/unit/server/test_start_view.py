# SPDX-License-Identifier: Apache-2.0
"""The plan that is printed once the server is ready."""

from __future__ import annotations

import io

from rich.console import Console

from tandemkv.server.start_view import start_view

VALUES = {
    "plan_refresh_steps": 2.0,
    "plan_lag_steps": 1.0,
    "plan_dense_tokens": 4164.0,
    "plan_scan_us": 240.25,
    "plan_transfer_us": 10.0,
    "plan_layer_us": 200.0,
    "plan_exposed_us": 25.1,
    "plan_is_hidden": 0.0,
}
INFO = {"plan_placement": "a GPU of its own", "plan_load": "8 x 65536", "plan_note": "chosen"}


def shown(values: dict[str, float]) -> str:
    """Render."""
    console = Console(width=140, file=io.StringIO(), record=True)
    view = start_view(values, INFO)
    assert view is not None
    console.print(view)
    return console.export_text()


def test_every_figure_is_shown() -> None:
    text = shown(VALUES)
    for part in ("a GPU of its own", "8 x 65536", "240.2", "10.0", "200.0", "25.1", "no", "4164"):
        assert part in text
    assert "chosen" in text
    assert "tokens in all" not in text
    assert "no more than 30720 tokens in all" in shown(
        VALUES | {"plan_dense_batch_tokens": 30720.0}
    )


def test_what_was_not_measured_is_a_dash() -> None:
    text = shown({k: v for k, v in VALUES.items() if not k.endswith(("_us", "hidden"))})
    assert text.count(" - ") == 5


def test_without_a_plan_nothing_is_shown() -> None:
    assert start_view({"steps_total": 3.0}, {}) is None
