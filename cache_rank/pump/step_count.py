# SPDX-License-Identifier: Apache-2.0
"""How far one thread of a pump has come, for another to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable

_POLL_S = 0.2


class StepCount:
    """The latest step that one thread is done with."""

    def __init__(self) -> None:
        self._latest, self._changed = 0, threading.Condition()

    def note(self, step: int) -> None:
        """Note that `step`, and all before it, are done."""
        with self._changed:
            self._latest = step
            self._changed.notify_all()

    def await_step(self, step: int, is_over: Callable[[], bool]) -> bool:
        """Wait until `step` is done; False: `is_over`."""
        with self._changed:
            while self._latest - step < 0:
                if is_over():
                    return False
                self._changed.wait(_POLL_S)
        return True
