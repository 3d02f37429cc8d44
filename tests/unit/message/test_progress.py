# SPDX-License-Identifier: Apache-2.0
"""That an engine on another host moves is told while nothing else of its step goes there."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.cache_rank.pump.far import FarSender
from tandemkv.cache_rank.pump.near import NearReceiver, Progress
from tandemkv.cache_rank.pump.records import Op


class Out:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Op, int, int]] = []

    def put(self, op: Op, a: int, b: int) -> None:
        self.sent.append((op, a, b))

    def flush(self) -> None:
        """It has gone."""


def side_of_a_host(num_layers: int = 2) -> Any:
    at = FlagIndex(num_layers)
    flags = StepFlags(torch.zeros((at.count, WORDS_APART), dtype=torch.int64))
    return SimpleNamespace(
        at=at, flags=flags, on_gpu=False, is_over=lambda: False, raise_to=flags.raise_to
    )


def test_requests_that_are_taken_up_slowly_are_progress_at_the_other_end() -> None:
    far, near, out = side_of_a_host(), side_of_a_host(), Out()
    sender: Any = FarSender.__new__(FarSender)
    sender._side, sender._out = far, out
    entry = StepEntry(kind=EntryKind.RESUME, step=7)
    waiting = threading.Thread(target=sender._tell_of_progress, args=(entry,))
    waiting.start()
    for count in (3, 5):  # layers whose keys are indexed anew
        far.flags.raise_to(far.at.PROGRESS, count)
        deadline = time.monotonic() + 10
        while (Op.RAISE, far.at.PROGRESS, count) not in out.sent:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    far.flags.raise_to(far.at.FINISHED, 7)
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(out.sent) == 2
    receiver: Any = NearReceiver.__new__(NearReceiver)
    receiver._side, progress = near, Progress(near)
    for op, a, b in out.sent:
        receiver._apply(SimpleNamespace(op=op, a=a, b=b))
        progress.note()
    assert near.flags.value(near.at.PROGRESS) == 2, "counted there, as every message is"
