# SPDX-License-Identifier: Apache-2.0
"""The plan that is printed once the server is ready."""

from __future__ import annotations

import io

from rich.console import Console

from tandemkv.server.cli.start_view import StartProgress, start_view

VALUES = {
    "plan_refresh_steps": 2.0,
    "plan_dense_tokens": 4164.0,
    "plan_scan_us": 240.25,
    "plan_transfer_us": 10.0,
    "plan_layer_us": 200.0,
    "plan_exposed_us": 25.1,
    "plan_is_hidden": 0.0,
}
INFO = {"plan_placement": "a GPU of its own", "plan_load": "8 x 65536", "plan_note": "chosen"}


def shown(values: dict[str, float], width: int = 80) -> str:
    """Render."""
    console = Console(width=width, file=io.StringIO(), record=True)
    view = start_view(values, INFO)
    assert view is not None
    console.print(view)
    return console.export_text()


def rows(text: str) -> dict[str, str]:
    """The table's lines by their names."""
    found = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in found}


def test_every_figure_is_shown_in_80_columns() -> None:
    text = shown(VALUES)
    assert "measured at start, 8 x 65536 tokens: us per layer" in text
    assert rows(text) == {
        "selection on": "a GPU of its own",
        "scan": "240.2",
        "transfer": "10.0",
        "model": "200.0",
        "exposed: added by selecting": "25.1 (not hidden)",
        "refresh every": "2 steps at most",
        "attends to everything": "up to 4164 tokens",
    }
    assert "chosen" in text
    assert "tokens in all" not in text
    assert "no more than 30720 tokens in all" in shown(
        VALUES | {"plan_dense_batch_tokens": 30720.0}
    )


def test_what_is_hidden_and_never_dense_says_so() -> None:
    found = rows(shown(VALUES | {"plan_is_hidden": 1.0, "plan_dense_tokens": 0.0}))
    assert found["exposed: added by selecting"] == "25.1 (hidden)"
    assert found["attends to everything"] == "never"


def test_what_was_not_measured_has_no_line() -> None:
    text = shown({k: v for k, v in VALUES.items() if not k.endswith(("_us", "hidden"))})
    names = ["selection on", "refresh every", "attends to everything"]
    assert list(rows(text)) == names


def test_without_a_plan_nothing_is_shown() -> None:
    assert start_view({"steps_total": 3.0}, {}) is None


def test_what_was_decided_stays_on_the_screen() -> None:
    console = Console(file=io.StringIO(), width=60, record=True)
    progress = StartProgress(console)
    with progress.stage("model m"):
        progress.tell("placement: link local [x] " + "long " * 20)
        progress.note("is overwritten")
    told, ok = console.export_text().splitlines()
    assert told.startswith("    placement: link local [x] long")
    assert told.endswith("long "), "not broken, so that it can be searched for"
    assert ok.startswith("ok  model m")
