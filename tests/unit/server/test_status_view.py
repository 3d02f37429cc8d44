# SPDX-License-Identifier: Apache-2.0
"""The table of `tandemkv status`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from tandemkv.server.cli.status_view import status_table


def shown(values: dict[str, float], *, styles: bool = False, **info: str) -> str:
    """The table of an inference rank without a cache rank."""
    console = Console(width=100, file=io.StringIO(), record=True, force_terminal=True)
    own = {"values": values, "info": {"cache_ranks": "0", **info}}
    console.print(status_table({"ready": True, "inference_rank": own}, "http://127.0.0.1:1"))
    return console.export_text(styles=styles)


def lines_of(values: dict[str, float]) -> list[list[str]]:
    """Cells of its rows."""
    lines = shown(values).splitlines()
    return [[cell.strip() for cell in x.strip("│").split("│")] for x in lines if x[:1] == "│"]


def test_units_are_shown_beside_values_and_not_in_names() -> None:
    found = {name: value for _, name, value in lines_of({"mapped_bytes": 2048.0, "steps": 7.0})}
    assert found["mapped"] == "2.00 KiB"
    assert found["steps"] == "7"


def test_large_times_have_no_exponent() -> None:
    values = {"exchange_wait_us_total": 394749.2, "longest_pause_ms": 999.4}
    found = {name: value for _, name, value in lines_of(values)}
    assert found["exchange wait"] == "394,749 us"
    assert found["longest pause"] == "999 ms"


def test_a_gauge_and_a_total_of_the_same_name_can_be_told_apart() -> None:
    found = {name: value for _, name, value in lines_of({"pause_s": 1.5, "pause_ms_total": 250.0})}
    assert found["pause"] == "1.5 s"
    assert found["pause total"] == "250 ms"


def test_what_went_wrong_is_marked_and_settings_are_not() -> None:
    yellow = "\x1b[33m"
    assert yellow in shown({"cache_rank_lost_total": 1.0}, styles=True)
    assert yellow not in shown({"cache_rank_lost_total": 0.0}, styles=True)
    assert yellow not in shown({}, styles=True, late_layers="1")


def test_the_manual_names_rows_as_they_are_shown() -> None:
    text = (Path(__file__).parents[3] / "docs/launch.md").read_text(encoding="utf-8")
    _, *tables = text.split("| row of `status` | meaning |\n|---|---|\n")
    named = [
        name
        for table in tables
        for line in table.partition("\n\n")[0].splitlines()
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert {"exchange wait", "announcement seen p50"} <= set(named)
    assert [name for name in named if "_" in name] == []
    (shown_as,) = [
        name for _, name, _ in lines_of({"announcement_seen_p50_us": 3.0}) if "ann" in name
    ]
    assert shown_as == "announcement seen p50"
