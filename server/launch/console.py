# SPDX-License-Identifier: Apache-2.0
"""What a launch writes to a terminal, a pipe or a file, any of which may be gone."""

from __future__ import annotations

import contextlib
from typing import Any

from rich.console import Console


class LaunchConsole(Console):
    """A console on stderr whose writes never fail: no launch ends because its reader has."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def print(self, *objects: Any, **more: Any) -> None:
        """Print, if anybody takes it."""
        with contextlib.suppress(OSError):  # the terminal is closed, or the disk full
            super().print(*objects, **more)

    def on_broken_pipe(self) -> None:
        """Print nothing more; rich would end the process."""
        self.quiet = True
