# SPDX-License-Identifier: Apache-2.0
"""How far ahead of a GPU a lane queues."""

from __future__ import annotations

from tandemkv.cache_rank.pump.plan import Flag, FlagKind, Message, Part, PartKind
from tandemkv.cache_rank.pump.queue_depth import QueueDepth, calls_of
from tandemkv.cache_rank.pump.stream_lanes import REPLAY_CALLS


def test_no_more_is_queued_than_a_stream_takes() -> None:
    """Also where a message is larger than all that may be; and once it is over nobody waits."""
    done: set[int] = set()
    asked: list[int] = []

    class Event:
        def __init__(self) -> None:
            self.number = len(asked)
            asked.append(0)

        def query(self) -> bool:
            asked[self.number] += 1
            if asked[self.number] > 2:  # the GPU gets there
                done.add(self.number)
            return self.number in done

    is_over = False
    depth = QueueDepth(Event, lambda: is_over, most=5)
    for number, num_parts in enumerate((2, 2, 9, 1, 3)):
        assert depth.make_room(num_parts)
        depth.note(num_parts)
        # Of what was queued before, that much is done that the rest is five parts, or nothing.
        assert len(done) == (0, 0, 2, 3, 3)[number]
    is_over = True
    assert not depth.make_room(4)


def test_events_are_asked_for_seldom() -> None:
    """Each costs the thread that queues as much as a kernel."""
    num_events = 0

    class Event:
        def __init__(self) -> None:
            nonlocal num_events
            num_events += 1

        def query(self) -> bool:
            return True

    depth = QueueDepth(Event, lambda: False, most=80)
    for _ in range(1000):
        assert depth.make_room(3)
        depth.note(3)
    assert num_events == 1000 // 4


def test_two_captured_steps_are_queued_and_no_third() -> None:
    """Where steps are announced far ahead the third waits for the first, whatever a graph takes."""
    ended: set[int] = set()
    made: list[int] = []

    class Event:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self.number)

        def query(self) -> bool:
            return self.number in ended

    requests = Message((Flag(FlagKind.BEGIN),), (Part(PartKind.REQUESTS),), ())

    def queue(depth: QueueDepth) -> bool:
        for calls in (calls_of(requests), REPLAY_CALLS):
            if not depth.make_room(calls):
                return False
            depth.note(calls)
        return True

    depth = QueueDepth(Event, lambda: True)  # it is over: nobody waits
    assert [queue(depth) for _ in range(3)] == [True, True, False]
    ended.add(0)
    assert queue(depth)
    assert not queue(depth)
