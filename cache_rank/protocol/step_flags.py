# SPDX-License-Identifier: Apache-2.0
"""Flags between two processes of one host: words in mapped memory that hold step numbers.

A flag is raised by writing the number of the step that it is for, and never taken down. A wait for
step n ends when the word is n or later, so a flag that comes after its wait was given up cannot
satisfy a later step. Every wait has an end.

On x86-64 and arm64 an aligned word of 8 bytes is written at once. Stores stay in order on x86-64,
where the system call that wakes up sleepers is made only if there may be one: a sleeper leaves word
1 of the line. One that is missed, for lack of a barrier or as its mark was cleared with that of
another, looks again within 2 ms.

Elsewhere the system call follows each store. It keeps no order between what was written before and
the flag, nor between a look at the flag and what is read then: only x86-64 was considered. arm64 is
let in, and has not been tried.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable

import torch

from .errors import SettingsError

WORDS_APART = 8
"""A flag has a cache line of 64 bytes of its own, for both processes poll."""

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_SPINS = 400
"""Looks before the first sleep: about 40 us, what waking up a sleeper costs."""
_SPINS_AWAKE = 100
"""Looks of who stays awake between two offers of the core to other threads."""
_SLICE_NS = 2_000_000
_EVERYBODY = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class StepFlags:
    """Words that two processes raise and wait for.

    They are ``words [num_flags, WORDS_APART]`` int64, mapped by both processes; word 0 of each line
    counts, word 1 is 1 if somebody may sleep. Raises `SettingsError` on a machine whose futex call
    is unknown.
    """

    def __init__(self, words: torch.Tensor) -> None:
        number = _SYSCALLS.get(platform.machine())
        if number is None:
            raise SettingsError(
                f"machine={platform.machine()}: two processes meet in shared memory on "
                f"{' and '.join(_SYSCALLS)} only; use --cache-ranks 0"
            )
        self._tensor = words  # keeps the memory mapped
        self._futex = number
        self._always_wakes = platform.machine() != "x86_64"
        self._view = memoryview(words.numpy()).cast("B").cast("q")  # type: ignore[arg-type]
        self._address = words.data_ptr()
        self._slice = _Timespec(0, _SLICE_NS)

    def __len__(self) -> int:
        return len(self._tensor)

    def value(self, flag: int) -> int:
        """Return the number that a flag was raised with last."""
        return self._view[flag * WORDS_APART]

    def raise_to(self, flag: int, step: int) -> None:
        """Let all that was written before be seen by who waits for `step`."""
        view, index = self._view, flag * WORDS_APART
        view[index] = step
        if not view[index + 1] and not self._always_wakes:
            return
        view[index + 1] = 0
        address = ctypes.c_void_p(self._address + index * 8)
        _libc.syscall(self._futex, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wait(
        self,
        flag: int,
        step: int,
        *,
        timeout_s: float,
        is_over: Callable[[], bool],
        awake_until: float = 0.0,
    ) -> bool:
        """Wait until a flag is raised to `step`, by difference, for `timeout_s` at most.

        `is_over` is asked every few milliseconds or more often; True ends the wait. Until
        `awake_until`, of `time.monotonic`, the core is kept busy, because a sleeper wakes up late;
        other threads of the process go on meanwhile. Returns whether the flag was raised.
        """
        view, index = self._view, flag * WORDS_APART
        for _ in range(_SPINS):
            if view[index] - step >= 0:
                return True
        deadline = time.monotonic() + timeout_s
        while True:
            seen = view[index]
            if seen - step >= 0:
                return True
            now = time.monotonic()
            if is_over() or now >= deadline:
                return False
            if now < awake_until:
                os.sched_yield()
                for _ in range(_SPINS_AWAKE):
                    if view[index] != seen:
                        break
            else:
                self._sleep(index, seen)

    def _sleep(self, index: int, seen: int) -> None:
        self._view[index + 1] = 1
        # The kernel compares the low half of the word, and sleeps only if it is as it was.
        address = ctypes.c_void_p(self._address + index * 8)
        result = _libc.syscall(
            self._futex, address, _FUTEX_WAIT, ctypes.c_int(seen & 0xFFFFFFFF),
            ctypes.byref(self._slice), None, 0,
        )  # fmt: skip
        if result < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
