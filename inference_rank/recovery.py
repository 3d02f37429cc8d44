# SPDX-License-Identifier: Apache-2.0
"""What happens when the cache rank is lost: nothing hangs, nobody gets a wrong token.

The epoch ends. Every request in flight is ended with HTTP 503 and the reason, before a token
that was computed without its KV is sent; requests that arrive meanwhile are refused the same
way; SGLang's radix tree is reset, because its nodes name lost KV, *before* anything is
admitted again; then a new epoch is opened with the cache rank that comes back.
All of it runs in SGLang's scheduler thread, between two steps; only the meeting with the cache
rank that comes back, which may take seconds, is left to `reconnect.Reconnecting`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from . import runtime as runtime_module
from .reconnect import Reconnecting
from .runtime import RemoteRuntime

_LOG = logging.getLogger(__name__)
_reconnecting: Reconnecting | None = None


def lost_message(reason: str | None) -> str:
    """Text that clients get."""
    return (
        f"the cache rank that holds this request's KV was lost ({reason}); "
        "retry, the server reconnects by itself"
    )


def after_batch(runtime: RemoteRuntime, batch: Any) -> None:
    """Mark the requests of a batch whose attention was cut short, before its result is used."""
    if runtime.client.lost_reason is not None:
        _end_requests(runtime, batch.reqs)


def tell_clients(runtime: RemoteRuntime) -> None:
    """Answer the clients of the running batch at once: its pass may go on for seconds.

    The requests themselves are ended by `after_batch`, when the pass is over.
    """
    if runtime.scheduler is None:
        return
    for req in runtime.running_reqs:
        if not req.finished():
            _send_abort(runtime.scheduler, req, runtime.client.lost_reason)


def before_requests(scheduler: Any, *_: Any, **__: Any) -> None:
    """Run once per scheduler iteration: drain after a loss, then reconnect."""
    runtime = runtime_module.with_other_process()
    if runtime is None:
        return
    if runtime.client.lost_reason is None:
        return
    _drain(runtime, scheduler)
    if scheduler.is_fully_idle():
        _reconnect(runtime, scheduler)


def around_queue(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a new request while there is no cache rank."""
    runtime = runtime_module.with_other_process()
    if runtime is None or runtime.client.lost_reason is None:
        return original(scheduler, req, *args, **kwargs)
    runtime.counters.requests_refused_total += 1
    _send_abort(scheduler, req, runtime.client.lost_reason)
    return None


def _drain(runtime: RemoteRuntime, scheduler: Any) -> None:
    reason = runtime.client.lost_reason
    while scheduler.waiting_queue:
        req = scheduler.waiting_queue.pop()
        runtime.counters.requests_failed_total += 1
        _send_abort(scheduler, req, reason)
    chunked = scheduler.chunked_req
    if chunked is not None and scheduler._pending_chunked_abort_req is None:
        runtime.counters.requests_failed_total += 1
        _send_abort(scheduler, chunked, reason)
        scheduler._pending_chunked_abort_req = chunked
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            _end_requests(runtime, [r for r in batch.reqs if r is not chunked])


def _end_requests(runtime: RemoteRuntime, reqs: list[Any]) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for req in reqs:
        if not req.finished() and req.to_finish is None:
            req.to_finish = FINISH_ABORT(
                lost_message(runtime.client.lost_reason),
                HTTPStatus.SERVICE_UNAVAILABLE,
                "CacheRankLostError",
            )
            runtime.counters.requests_failed_total += 1


def _send_abort(scheduler: Any, req: Any, reason: str | None) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    abort = AbortReq(
        rid=req.rid,
        finished_reason={
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": lost_message(reason),
        },
    )
    scheduler.ipc_channels.send_to_tokenizer.send_output(abort, req)


def _reconnect(runtime: RemoteRuntime, scheduler: Any) -> None:
    """Begin the new epoch, if a connection was opened meanwhile."""
    global _reconnecting
    if _reconnecting is None:
        runtime.client.drop()
        _reconnecting = Reconnecting(runtime.client.open_connection)
    connection = _reconnecting.take()
    if connection is None:
        return
    _reconnecting = None
    try:
        runtime.adopt(connection)
    except Exception:  # it stays lost, requests get 503, and the next round tries again
        _LOG.exception("the cache rank that came back cannot be used")
        runtime.client.mark_lost("the cache rank that came back cannot be used; see the log")
        return
    # The tree names KV of the old epoch: reset before anything is admitted.
    scheduler.flush_cache(empty_cache=False)
    _LOG.warning("cache rank is back, epoch %d", runtime.client.epoch)
