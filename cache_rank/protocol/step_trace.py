# SPDX-License-Identifier: Apache-2.0
"""Chrome traces of a cache rank's steps, beside those of the inference rank.

Off unless ``TANDEMKV_TRACE`` names a folder; only `tandemkv bench decode --profile` sets it. The
inference rank writes the name of a trace to the file ``wanted`` in that folder, and removes it
behind the steps of the trace. Each cache rank looks for it between two steps, answers by a file of
its own while it traces, and leaves ``<name>_engine<number>.json.gz``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands read names of this module, and need no torch
    import torch

logger = logging.getLogger(__name__)

TRACE_VARIABLE = "TANDEMKV_TRACE"
TRACE_SUFFIX = ".json.gz"
_WANTED, _RUNNING = "wanted", ".running"
_ANSWER_S, _TICK_S = 60.0, 0.01
"""The first trace of a process loads CUPTI, and each is written, while no step is under way."""


@contextlib.contextmanager
def traced_beside(folder: Path, name: str, count: int) -> Iterator[None]:
    """Have `count` cache ranks trace their steps of the body; it must have ended all of them.

    No step may be under way at the beginning. One that does not answer has no trace, and the body
    is run all the same.
    """
    if not count:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    answers = [folder / f"{name}_engine{number}{_RUNNING}" for number in range(count)]
    for answer in answers:
        answer.unlink(missing_ok=True)
    wanted, whole = folder / _WANTED, folder / f"{_WANTED}.new"
    whole.write_text(name, encoding="utf-8")
    whole.rename(wanted)
    try:
        _await(lambda: all(each.exists() for each in answers), "begun")
        yield
    finally:
        wanted.unlink(missing_ok=True)
        _await(lambda: not any(each.exists() for each in answers), "ended")


def _await(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _ANSWER_S
    while not is_done():
        if time.monotonic() > deadline:
            logger.warning("a cache rank has not %s its trace in %g s", what, _ANSWER_S)
            return
        time.sleep(_TICK_S)


def tracer(
    number: int, device: torch.device, environ: Mapping[str, str] = os.environ
) -> Iterator[None] | None:
    """Return what traces steps of cache rank `number`; None unless the variable is set.

    To be advanced between two steps, by the thread that does them. On a GPU the kernels of all
    streams are in a trace, also those of replayed graphs; on a CPU the operations of this thread.
    """
    folder = environ.get(TRACE_VARIABLE)
    return _trace(Path(folder), number, device.type) if folder else None


def _trace(folder: Path, number: int, device_type: str) -> Iterator[None]:
    from torch import profiler as torch_profiler

    kinds = torch_profiler.ProfilerActivity
    kind = kinds.CUDA if device_type == "cuda" else kinds.CPU
    wanted = folder / _WANTED
    while True:
        while (name := _read(wanted)) is None:
            yield
        path = folder / f"{name}_engine{number}"
        running = path.with_name(path.name + _RUNNING)
        try:
            with torch_profiler.profile(activities=[kind]) as profiler:
                running.touch()
                while wanted.exists():
                    yield
            profiler.export_chrome_trace(str(path) + TRACE_SUFFIX)
        except Exception as error:  # must not end an epoch
            reason = " ".join(str(error).split())[:300]
            logger.warning("steps are not traced: %s: %s", type(error).__name__, reason)
            with contextlib.suppress(OSError):  # the folder may be gone, and that the reason
                running.touch()  # nobody waits in vain
            while wanted.exists():
                yield
        running.unlink(missing_ok=True)


def _read(wanted: Path) -> str | None:
    """Return the name of the trace that is wanted; None if there is none, or no more."""
    try:
        return wanted.read_text(encoding="utf-8")
    except OSError:  # who asked tells that no trace has begun
        return None
