# SPDX-License-Identifier: Apache-2.0
"""Whether a rank that runs gets on: asked again and again, from a thread of the launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tandemkv.cache_rank.protocol.errors import TandemKVError

_INTERVAL_S = 1.0
_LONGEST_TURN_S = 15.0
"""A question has a time limit; a turn that takes longer means that the launcher itself slept."""


class Pulse(NamedTuple):
    """What a rank says: whether it is ready, and how long its work has not moved.

    `waits`: another serves, whose place it will take.
    """

    is_ready: bool
    stalled_s: float
    waits: bool = False


class Liveness:
    """Asks one rank for its pulse.

    `ask` returns the pulse, within a time limit, and raises `TandemKVError` if nobody answers.
    Only what a question found counts: a launcher that was stopped, as with Ctrl-Z, judges no rank
    before it has asked it again.
    """

    def __init__(self, ask: Callable[[], Pulse], interval_s: float = _INTERVAL_S) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._generation = 0
        self.expect_start()

    def expect_start(self) -> None:
        """Forget what was known: the rank is started now, and not judged before it was ready."""
        with self._lock:
            self._was_ready, self._waits = False, False
            self._started = self._answered = time.monotonic()
            self._starting_s, self._silent_s = 0.0, 0.0
            self._stalled_s, self._reason = 0.0, ""
            self._generation += 1

    def note_ready(self) -> None:
        """Take for known that it is ready: whoever started it has seen so."""
        with self._lock:
            self._was_ready, self._answered = True, time.monotonic()
            self._silent_s = 0.0

    def start(self) -> None:
        """Begin to ask. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask no more. A question under way is not waited for."""
        self._stopping.set()

    @property
    def was_ready(self) -> bool:
        """Whether the rank has been ready since it was started."""
        return self._was_ready

    @property
    def waits(self) -> bool:
        """Whether another served when it was asked last."""
        return self._waits

    def hangs(self, timeout_s: float) -> str | None:
        """Return why the rank counts as hung, None if it does not."""
        with self._lock:
            if not self._was_ready:
                return None
            if self._stalled_s > timeout_s:
                return f"its work has not moved for {self._stalled_s:.0f} s"
            is_silent = self._silent_s > timeout_s
            return f"no answer for {self._silent_s:.0f} s ({self._reason})" if is_silent else None

    def is_late(self, timeout_s: float) -> bool:
        """Whether the rank was not ready when it was asked `timeout_s` after its start."""
        with self._lock:
            return not self._was_ready and self._starting_s > timeout_s

    def _run(self) -> None:
        turn = time.monotonic()
        while not self._stopping.is_set():
            generation = self._generation
            reason = ""
            try:
                pulse: Pulse | None = self._ask()
            except TandemKVError as error:
                pulse, reason = None, str(error)
            except Exception:  # e.g. no more descriptors here: nothing is known of the rank
                pulse = Pulse(is_ready=False, stalled_s=0.0)
            now = time.monotonic()
            with self._lock:
                if generation == self._generation:
                    if now - turn > _LONGEST_TURN_S:  # this process was stopped meanwhile
                        self._started += now - turn
                        self._answered = now
                    self._note(pulse, reason, now)
            turn = now
            self._stopping.wait(self._interval_s)

    def _note(self, pulse: Pulse | None, reason: str, now: float) -> None:
        self._starting_s = now - self._started
        if pulse is None:
            self._silent_s, self._reason = now - self._answered, reason
            return
        self._answered, self._silent_s = now, 0.0
        self._stalled_s, self._waits = pulse.stalled_s, pulse.waits
        self._was_ready = self._was_ready or pulse.is_ready
