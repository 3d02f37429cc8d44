# SPDX-License-Identifier: Apache-2.0
"""What happens when the cache rank is lost: clients see a pause, and their requests go on.

Runs in SGLang's scheduler thread, once per turn of its loop; only the meeting with the cache rank
that comes back is left to a thread. While there is no cache rank SGLang's loop is paused as its own
`pause_generation` does it: new requests are taken in and wait, aborts are noted.

If no cache rank could be used for the recovery timeout, requests end with HTTP 503, or an error
event on an open stream, and new ones are refused until there is one again.

Each tensor-parallel rank has cache ranks of its own. What one rank sees of its own is agreed on
before anything follows from it (`agreement`): a lost one pauses all ranks, and the epochs of the
others end as well, in order, so that all engines take up the same requests. So do those of the
other cache ranks of one rank (`tandemkv.inference_rank.links.sharded`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from http import HTTPStatus
from typing import Any

from tandemkv.cache_rank.protocol.step_ring import RESIDENT, StepRow
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.connection import SharedConnection
from tandemkv.inference_rank.links.sharded import ShardedConnection
from tandemkv.inference_rank.reconnect import Reconnecting
from tandemkv.inference_rank.sglang.versions import committed, row_of

from .agreement import Agreement
from .passes import PassLog
from .penalties import PenaltyLog
from .rewind import end_requests, live_requests, recompute, rewind, trim_ended

_LOG = logging.getLogger(__name__)
_TURN_S = 0.005
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 5.0
"""Between epochs that end while rows are taken up."""
_MOST_FAILED_RESUMES = 2
"""After so many epochs that ended while rows were taken up, what is known of them is given up."""


class State(Enum):
    """Of the server, as far as the cache rank goes."""

    SERVING = "serving"
    MEETING = "waiting for a cache rank"
    RESUMING = "the cache rank takes up requests"


class Recovery:
    """The state of one scheduler. Used by its thread; `is_down` and `pause_s` by any.

    `passes` and `penalties` are what the passes under way have changed. `num_cold` is the longest
    request that has no resident set. `refill` brings what only the inference rank keeps of rows,
    pairs of a row and its tokens, to what it was before the lost passes; `note_seeded` is called
    where a rank has chosen sets anew, as behind a prompt. A pause lasts `timeout_s` at most.
    """

    def __init__(
        self,
        connection: SharedConnection | ShardedConnection,
        passes: PassLog,
        penalties: PenaltyLog,
        counters: Counters,
        *,
        generation_of: Callable[[int], int],
        num_cold: int,
        refill: Callable[[Sequence[tuple[int, int]]], None],
        note_seeded: Callable[[], None],
        timeout_s: float,
        agreement: Agreement | None = None,
    ) -> None:
        self._refill, self._note_seeded = refill, note_seeded
        self._agreement = agreement or Agreement()
        self._connection, self._counters = connection, counters
        self._passes, self._penalties = passes, penalties
        self._generation_of, self._num_cold, self._timeout_s = generation_of, num_cold, timeout_s
        self.state = State.SERVING
        self.is_down = False
        self._reason: str | None = None  # of the latest loss, also once an epoch was adopted
        self._began = self._paused_s = self._served_since = 0.0
        self._confirmed = self._num_taken = -1
        self._failed_resumes = 0
        self._not_before, self._backoff_s = 0.0, _FIRST_BACKOFF_S
        self._was_paused = False
        self._reconnecting: Reconnecting | None = None
        self._opened: Any = None

    @property
    def pause_s(self) -> float:
        """Seconds since requests stopped; 0 while they are served."""
        return 0.0 if self.state is State.SERVING else time.monotonic() - self._began

    def turn(self, scheduler: Any) -> None:
        """Do what is due; SGLang's loop makes no pass after it while it is paused."""
        if self.state is State.RESUMING:  # nobody else waits for its engine
            self._connection.lose_if_stuck()
        if self.state is State.MEETING:
            self._meet(scheduler)
        elif self._agreement.any(self._connection.lost_reason is not None):
            if self.state is State.SERVING:
                self._begin(scheduler)
            else:
                self._fail_to_resume()
        elif self.state is State.SERVING:
            if not self._passes.dropped:
                return
            self._begin(scheduler)
        elif self._agreement.all(self._connection.has_finished(self._connection.step)):
            self._end(scheduler)
            return
        paused_s = self._paused_s + self.pause_s  # the pauses before of the same loss as well
        if not self.is_down and self._agreement.any(paused_s > self._timeout_s):
            self._give_up(scheduler)
        if self.is_down:
            self._refuse_waiting(scheduler)
        else:
            scheduler.maybe_send_health_check_signal()
        time.sleep(_TURN_S)

    def refuses(self, scheduler: Any, req: Any) -> bool:
        """Refuse a new request if no cache rank came back for too long."""
        if not self.is_down:
            return False
        self._counters.requests_refused_total += 1
        _send_abort(scheduler, req, self._reason)
        return True

    def before_release(self, req: Any, tree_cache: Any) -> None:
        """Take from a request that has ended what a pass under way stores for it."""
        trim_ended(req, tree_cache)

    def note_pause(self, scheduler: Any) -> None:
        """Note that an administrator paused the server, or let it go on."""
        if self.state is not State.SERVING:
            self._was_paused, scheduler._engine_paused = scheduler._engine_paused, True

    # -- states --------------------------------------------------------------------------

    def _begin(self, scheduler: Any) -> None:
        if self._agreement.any(self._has_moved()):  # else the same loss goes on
            self._paused_s = 0.0
        self._began = time.monotonic()
        self._note_progress()
        self._counters.pauses_total += 1
        self._end_epoch()
        self._count_losses()
        self._was_paused, scheduler._engine_paused = scheduler._engine_paused, True
        lost = list(self._passes.dropped)
        if scheduler.enable_overlap:
            for batch, result in scheduler.result_queue:
                # Its tokens must not come over those that rewinding puts in their place.
                self._passes.await_end(batch, result)
                lost.append(batch)
        found = rewind(scheduler, lost, self._penalties)
        self._passes.rewind(lost)
        self._counters.rewound_rows_total += found.num_rewound
        self._counters.prefilled_again_total += len(found.prefilled_again)
        _LOG.warning(
            "the cache rank is lost (%s): %d requests wait, %d of them were rewound by a token, "
            "%d prompts are computed again",
            self._connection.lost_reason,
            len(found.decoding) + len(found.prefilled_again),
            found.num_rewound,
            len(found.prefilled_again),
        )
        self._await_cache_rank()

    def _has_moved(self) -> bool:
        """Whether any pass was used since the last pause, or it is long ago.

        Of what a pass asks of the engine, dense steps ask nothing, and an idle server has no pass.
        """
        moved = self._connection.confirmed != self._confirmed
        moved |= self._passes.num_taken != self._num_taken
        return moved or time.monotonic() - self._served_since > self._timeout_s

    def _note_progress(self) -> None:
        self._confirmed, self._num_taken = self._connection.confirmed, self._passes.num_taken

    def _end_epoch(self) -> None:
        """End the epoch of every engine that is not lost: one did not finish, or is lost."""
        if self._connection.lost_reason is None and self._agreement.is_alone:
            self._connection.mark_lost("a step was not finished")
        else:  # of those that live: the others', or with several of this rank's the rest of them
            self._connection.leave("another cache rank was lost")

    def _fail_to_resume(self) -> None:
        self._failed_resumes += 1
        self._backoff_s = min(_LONGEST_BACKOFF_S, 2 * self._backoff_s)
        self._not_before = time.monotonic() + self._backoff_s
        self._end_epoch()
        self._count_losses()
        self._await_cache_rank()

    def _count_losses(self) -> None:
        """Note what other tensor-parallel ranks have lost: only the first one's status is read."""
        own = self._counters.cache_rank_lost_total
        self._counters.lost_by_other_ranks = self._agreement.total(own) - own

    def _await_cache_rank(self) -> None:
        self._reason = self._connection.lost_reason
        self.state, self._reconnecting, self._opened = State.MEETING, None, None

    def _open(self) -> None:
        """Have a connection, if it can be had; it is kept until all ranks have one."""
        if self._opened is not None:
            if not self._opened.is_gone:
                return
            self._opened.close()
            self._opened = None
        if self._reconnecting is None:
            if time.monotonic() < self._not_before:
                return
            self._reconnecting = Reconnecting(self._connection.open_connection)
        self._opened = self._reconnecting.take()
        if self._opened is not None:
            self._reconnecting = None

    def _meet(self, scheduler: Any) -> None:
        self._open()
        if not self._agreement.all(self._opened is not None):
            return
        opened, self._opened = self._opened, None
        is_hopeless = self._failed_resumes >= _MOST_FAILED_RESUMES
        if self._agreement.any(is_hopeless or opened.has_lost_memory):
            requests = recompute(scheduler, self._penalties)
            self._counters.recomputed_requests_total += len(requests)
            _LOG.warning("%d requests are computed again from their tokens", len(requests))
            self._connection.forget_rows()
            self._failed_resumes = 0
            opened.close()
            self._await_cache_rank()
            return
        if not self._agreement.all(self._adopt(opened)):
            self._end_epoch()
            self._await_cache_rank()
            return
        rows = self._rows(scheduler)
        self._connection.resume(rows)
        self.state = State.RESUMING

    def _adopt(self, opened: Any) -> bool:
        try:
            self._connection.adopt(opened)
        except Exception as error:
            _LOG.exception("the cache rank that came back cannot be used")
            self._connection.mark_lost(f"the cache rank that came back cannot be used: {error}")
            return False
        return True

    def _end(self, scheduler: Any) -> None:
        connection, pause_s = self._connection, self.pause_s
        # From K/V that came back before the engine's last word.
        self._refill([(row.row, row.length) for row in self._rows(scheduler)])
        connection.confirm(connection.step)
        self._note_progress()
        self._paused_s += pause_s
        self._served_since, self._failed_resumes = time.monotonic(), 0
        restored, reseeded = connection.resumed_rows
        self._counters.restored_rows_total += restored
        self._counters.reseeded_rows_total += reseeded
        if self._agreement.any(reseeded > 0):
            self._note_seeded()
        self._counters.note_pause(pause_s)
        self.state, self.is_down, self._backoff_s = State.SERVING, False, _FIRST_BACKOFF_S
        scheduler._engine_paused = self._was_paused
        _LOG.warning(
            "the cache rank is back after %.2f s, epoch %d: %d resident sets taken up, %d seeded "
            "anew",
            pause_s,
            connection.epoch,
            restored,
            reseeded,
        )

    def _rows(self, scheduler: Any) -> tuple[StepRow, ...]:
        """Return the requests that have a row, as the engine is to take them up."""
        found = []
        for req in live_requests(scheduler):
            row, length = row_of(req), committed(req)
            assert row is not None  # `live_requests` have one
            # One that was retracted has tokens, and no set before its last chunk.
            is_whole = bool(req.output_ids) and req is not scheduler.chunked_req
            is_resident = is_whole and length > self._num_cold
            found.append(
                StepRow(
                    row=row,
                    generation=self._generation_of(row),
                    length=length,
                    prefix_len=length,
                    flags=RESIDENT if is_resident else 0,
                )
            )
        return tuple(found)

    # -- too long ------------------------------------------------------------------------

    def _give_up(self, scheduler: Any) -> None:
        self.is_down = True
        requests = end_requests(scheduler, self._penalties)
        self._counters.requests_failed_total += len(requests)
        for req in requests:
            _send_abort(scheduler, req, self._reason)
        num_waiting = self._refuse_waiting(scheduler)
        _LOG.error(
            "no cache rank for %g s (--recovery-timeout-s): %d requests end with HTTP 503",
            self._timeout_s,
            len(requests) + num_waiting,
        )

    def _refuse_waiting(self, scheduler: Any) -> int:
        """End the requests that were not begun; returns how many there were."""
        count = 0
        # SGLang looks for grammars that are compiled before a pass, and there is none.
        for queue in (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue):
            while queue:
                req = queue.pop(0)
                if isinstance(req.grammar, Future):
                    req.grammar.cancel()
                count += 1
                _send_abort(scheduler, req, self._reason)
        self._counters.requests_failed_total += count
        return count


def _send_abort(scheduler: Any, req: Any, reason: str | None) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    abort = AbortReq(
        rid=req.rid,
        finished_reason={
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": f"the cache rank that holds this request's KV was lost ({reason}) and is "
            "not back; retry, the server goes on as soon as it is",
        },
    )
    scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)
