# SPDX-License-Identifier: Apache-2.0
"""The stages of a start, as a person or a log file reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status


class StartProgress:
    """Shows the stage under way and a line for each finished one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._title = ""

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Run one stage; a line with its duration follows when it ends well."""
        self._title = title
        started = time.monotonic()
        with self._console.status(f"{title} ...") as self._status:
            yield
        self._console.print(f"[green]ok[/]  {title} [dim]{time.monotonic() - started:.1f} s[/]")

    def note(self, text: str) -> None:
        """Show `text` beside the stage under way; overwritten by the next note."""
        if self._status is not None:
            self._status.update(f"{self._title} ... [dim]{text}[/]")
