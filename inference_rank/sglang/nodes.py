# SPDX-License-Identifier: Apache-2.0
"""SGLang over several hosts: how its processes meet, agree on settings, and end together.

Node 0 has the HTTP server. The other ones have schedulers below a process that waits for them. All
end when node 0 ends them, in a turn of their loop; a signal to another node asks node 0 for that.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.node_store import ask_end, await_end, check_equal
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

from . import versions as sglang_versions
from .shutdown import kill_below, remove_temporary_files

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
_ARGS = ("max_running_requests", "chunked_prefill_size", "context_length", "dtype")
"""Arguments of SGLang by which all schedulers have to plan the same passes."""


def check_settings(settings: RankSettings, args: Any) -> None:
    """Compare settings, and SGLang's `args`, resolved, with those of the first scheduler.

    Raises `SettingsError`, naming what differs.
    """
    own = settings.flat() | {name: str(getattr(args, name, None)) for name in _ARGS}
    if args.device != "cpu":  # by its memory SGLang decides which sizes of a step are captured
        own["gpu"] = torch.cuda.get_device_name()
    check_equal(sglang_versions.tensor_rank(), own)


def serve_schedulers(
    original: Callable[..., Any], *args: Any, address: LinkAddress, **kwargs: Any
) -> None:
    """Wait for the schedulers of a node that has no HTTP server, and end this process with them.

    In place of SGLang's own way, which goes on to start that server once they have ended.
    """
    schedulers = multiprocessing.active_children()
    _end_on_signal(address)
    original(*args, **kwargs)
    _await_schedulers(schedulers)
    kill_below()
    remove_temporary_files()
    sys.stdout.flush()
    os._exit(1 if any(scheduler.exitcode for scheduler in schedulers) else 0)


def _await_schedulers(schedulers: Sequence[BaseProcess]) -> None:
    """Return once all have ended, or any of them with an error: the others would wait for it."""
    running = list(schedulers)
    while running and not any(scheduler.exitcode for scheduler in schedulers):
        poll = select.poll()
        for scheduler in running:
            poll.register(scheduler.sentinel, select.POLLIN)
        # What a scheduler has forked may hold its sentinel open for longer than it lives.
        poll.poll(_LOOK_S * 1e3)
        for scheduler in [each for each in running if not each.is_alive()]:
            running.remove(scheduler)
            _LOG.info("scheduler %s ended with %s", scheduler.pid, scheduler.exitcode)


def _end_on_signal(address: LinkAddress) -> None:
    def ask(*_: Any) -> None:
        _LOG.warning("asking node 0 to end the server")
        try:
            ask_end(address)
        except (OSError, RuntimeError) as error:  # torch's and ours are of the second kind
            _LOG.warning("node 0 does not answer (%s): ending at once", error)
            kill_below()
            os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def follow_end(address: LinkAddress, end: Callable[[], object]) -> None:
    """Call `end`, from a thread, once another node asks for the end; for node 0."""

    def follow() -> None:
        if await_end(address):
            _LOG.warning("another node asks to end the server")
            end()

    threading.Thread(target=follow, name="tandemkv-nodes", daemon=True).start()
