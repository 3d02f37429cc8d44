# SPDX-License-Identifier: Apache-2.0
"""How SGLang's HTTP process ends: SIGTERM drains it, and a dead child cuts what is in flight.

SIGTERM and SIGINT make the server unready at once, refuse new work, let requests finish for
``TANDEMKV_DRAIN_TIMEOUT_S``, end the rest with an error, and exit with 0; a second signal exits at
once. SGLang by itself goes on accepting, looks every 5 s, and waits without a bound.
A scheduler that died (SIGQUIT, as SGLang tells itself) leaves every request with a 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tandemkv.cache_rank.protocol.errors import SettingsError

from .drain import DEFAULT_DRAIN_TIMEOUT_S, DRAIN_TIMEOUT_VARIABLE, Drain

_LOG = logging.getLogger(__name__)
_LAST_ANSWERS_S = 1.0
"""For the errors of requests that were cut to reach their clients."""
_SCHEDULER_EXIT_S = 5.0
_current: Shutdown | None = None


class Shutdown:
    """Ends this process in order. Belongs to the event loop of the HTTP server.

    Its methods are called there.

    Requests under way have `timeout_s`. `end` is called last, in the event loop; by default it ends
    this process and all below it.
    """

    def __init__(
        self, drain: Drain, timeout_s: float, end: Callable[[], None] | None = None
    ) -> None:
        self.drain = drain
        self._timeout_s = timeout_s
        self._end = end or (lambda: os._exit(0))
        self._num_signals = 0
        self._is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    def install(self) -> None:
        """Handle SIGTERM, SIGINT and SIGQUIT on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_stop_signal)
        loop.add_signal_handler(signal.SIGQUIT, self.on_dead_child)

    def on_stop_signal(self) -> None:
        """Begin to drain; end at once if it is the second signal."""
        self._num_signals += 1
        if self._num_signals > 1:
            _LOG.warning("second signal: ending at once")
            kill_below()
            self._end()
            return
        self.begin()

    def begin(self) -> None:
        """Begin to drain, unless that has begun."""
        if self._is_draining:
            return
        self._is_draining = True
        self.drain.refuse("the server is shutting down; send the request to another one")
        _LOG.warning(
            "draining: %d requests in flight, at most %g s (--drain-timeout-s)",
            self.drain.num_in_flight,
            self._timeout_s,
        )
        self._spawn(self._drain_and_end())

    def on_dead_child(self, and_then: Callable[[], None] | None = None) -> None:
        """End what is in flight with 503, then the process: a child of SGLang's died."""
        _LOG.error("a process of SGLang's died (SIGQUIT): ending what is in flight with 503")
        self.drain.cut("SGLang's scheduler died; retry, the server is started again")
        self._spawn(self._end_after_answers(and_then))

    async def _drain_and_end(self) -> None:
        if not await self.drain.finish(self._timeout_s):
            _LOG.warning("%d requests did not finish in time", self.drain.num_in_flight)
            self.drain.cut(
                f"the server shut down before the request was finished, after {self._timeout_s:g} "
                "s (--drain-timeout-s)"
            )
            await self.drain.finish(_LAST_ANSWERS_S)
        try:
            await _end_scheduler()
        except Exception:  # it is killed instead
            _LOG.exception("the scheduler was not asked to end")
        kill_below()
        remove_temporary_files()
        self._end()

    async def _end_after_answers(self, and_then: Callable[[], None] | None) -> None:
        await self.drain.finish(_LAST_ANSWERS_S)
        await asyncio.sleep(0.1)  # for the sockets
        if and_then is not None:
            and_then()  # SGLang's own: dumps what it was asked to, and kills the process
        kill_below()
        os.kill(os.getpid(), signal.SIGKILL)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def create() -> Shutdown:
    """Return the one of this process, made from the environment.

    Raises `SettingsError` if the time to drain is no number.
    """
    global _current
    text = os.environ.get(DRAIN_TIMEOUT_VARIABLE, str(DEFAULT_DRAIN_TIMEOUT_S))
    try:
        timeout_s = float(text)
    except ValueError as error:
        raise SettingsError(
            f"{DRAIN_TIMEOUT_VARIABLE}={text!r} must be a number of seconds"
        ) from error
    _current = Shutdown(Drain(), timeout_s)
    return _current


def around_sigterm(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Drain where SGLang, at its first request, installs a handler of its own."""
    if _current is None:
        original(*args, **kwargs)
    else:
        _current.on_stop_signal()


def around_sigquit(original: Callable[..., None], handler: Any, *args: Any, **kwargs: Any) -> None:
    """Tell clients before SGLang kills its processes.

    SGLang's own handler spends seconds on diagnostics first: only with ``--crash-dump-folder``.
    """
    if _current is None:
        original(handler, *args, **kwargs)
    elif handler.tokenizer_manager.crash_dump_folder:
        _current.on_dead_child(lambda: original(handler, *args, **kwargs))
    else:
        _current.on_dead_child()


def remove_temporary_files() -> None:
    """Empty the run directory's folder for temporary files, if that is what we use.

    Whoever started SGLang with ``tandemkv inference-rank`` has become it: nobody else is left.
    """
    from tandemkv.inference_rank import runtime

    temporary = runtime.run_dir_from_environment().temporary
    if Path(os.environ.get("TMPDIR", "")) == temporary:
        shutil.rmtree(temporary, ignore_errors=True)


async def _end_scheduler() -> None:
    """Ask SGLang's schedulers to end, and wait for them."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    manager = get_global_state().tokenizer_manager
    if manager._subprocess_watchdog is not None:
        await asyncio.to_thread(manager._subprocess_watchdog.stop)
    manager._dispatch_to_scheduler(ShutdownReq())
    deadline = time.monotonic() + _SCHEDULER_EXIT_S
    while time.monotonic() < deadline and collect_scheduler_processes():
        await asyncio.sleep(0.05)


def kill_below() -> None:
    """Kill all processes below this one, and wait for them."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=_SCHEDULER_EXIT_S)
