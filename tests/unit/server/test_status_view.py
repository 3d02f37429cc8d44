# SPDX-License-Identifier: Apache-2.0
"""The table of `tandemkv status`."""

from __future__ import annotations

import io

from rich.console import Console

from tandemkv.server.status_view import status_table


def lines_of(values: dict[str, float]) -> list[list[str]]:
    """Cells of the rows about an inference rank without a cache rank."""
    console = Console(width=100, file=io.StringIO(), record=True)
    reply = {"ready": True, "inference_rank": {"values": values, "info": {"cache_ranks": "0"}}}
    console.print(status_table(reply, "http://127.0.0.1:1"))
    lines = console.export_text().splitlines()
    return [[cell.strip() for cell in x.strip("│").split("│")] for x in lines if x[:1] == "│"]


def test_units_are_shown_beside_values_and_not_in_names() -> None:
    found = {name: value for _, name, value in lines_of({"mapped_bytes": 2048.0, "steps": 7.0})}
    assert found["mapped"] == "2.00 KiB"
    assert found["steps"] == "7"


def test_a_gauge_and_a_total_of_the_same_name_can_be_told_apart() -> None:
    found = {name: value for _, name, value in lines_of({"pause_s": 1.5, "pause_ms_total": 250.0})}
    assert found["pause"] == "1.5 s"
    assert found["pause total"] == "250 ms"
