# SPDX-License-Identifier: Apache-2.0
"""A launch goes on when nobody reads what it says."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tandemkv.server.launch.console import LaunchConsole


def test_a_reader_that_has_gone_ends_nothing() -> None:
    console = LaunchConsole()
    reader, writer = os.pipe()
    os.close(reader)
    console.file = os.fdopen(writer, "w")
    for _ in range(3):
        console.print("draining")
    assert console.quiet


def test_a_full_disk_ends_nothing() -> None:
    console = LaunchConsole()
    console.file = file = Path("/dev/full").open("w")  # noqa: SIM115
    try:
        for _ in range(3):
            console.print("draining")
    finally:
        with suppress(OSError):
            file.close()


def test_what_is_read_is_said() -> None:
    console = LaunchConsole()
    with console.capture() as said:
        console.print("ready")
    assert said.get() == "ready\n"
