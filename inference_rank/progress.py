# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's thread last did, for whoever has to tell a busy rank from one that hangs.

The thread moves with each turn of its loop and with each attention layer of a pass, so that a
long prefill is seen to move. It is idle while it waits for requests. A pass on a GPU is
launched ahead of its computation: there the wait for the device is one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.progress import ProgressClock
from tandemkv.inference_rank.sglang.heap import heap

clock = ProgressClock()
"""Of this process's scheduler thread."""
has_begun = False
"""Whether its loop turns: what is captured has been captured by then."""


def on_turn(*_: Any, **__: Any) -> None:
    """Note a turn of the scheduler's loop."""
    global has_begun
    has_begun = True
    clock.advance()


def on_layer(*_: Any, **__: Any) -> None:
    """Note an attention layer."""
    reach("inference_rank.layer")
    clock.advance()


def around_idle(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Note that the loop found no work; housekeeping gives memory back, and may sleep."""
    clock.idle()
    heap.on_idle(scheduler)
    original(scheduler, *args, **kwargs)
