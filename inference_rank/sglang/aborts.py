# SPDX-License-Identifier: Apache-2.0
"""An abort ends the request that it is about, and no other.

SGLang's scheduler ends every request whose id begins like the one that is named, and clients may
name theirs: one that called it ``a`` and left would end those of others. And what SGLang does two
seconds after a stream has ended is to abort its id, which may be a later request's by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import BackgroundTasks

_GRACE_S = 2.0
"""As SGLang's own: a client that has gone is noticed by then."""


def around_abort(
    original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hide from `Scheduler.abort_request` who is not meant; SGLang names each of `n` by itself."""
    name = recv_req.rid
    hidden: list[tuple[Any, str]] = []
    if not recv_req.abort_all:
        hidden = [(r, r.rid) for r in _known(scheduler) if r.rid != name and r.rid.startswith(name)]
    for req, _ in hidden:
        req.rid = ""
    try:
        return original(scheduler, recv_req, *args, **kwargs)
    finally:
        for req, rid in hidden:
            req.rid = rid


def around_abort_task(_original: Callable[..., Any], manager: Any, obj: Any) -> BackgroundTasks:
    """Abort what is left of a stream that has ended (`TokenizerManager.create_abort_task`)."""

    async def abort() -> None:
        await asyncio.sleep(_GRACE_S)
        if not obj.is_single:
            for rid in obj.rid:
                manager.abort_request(rid)
            return
        state = manager.rid_to_state.get(obj.rid)
        if state is not None and state.obj is obj:
            manager.abort_request(obj.rid)

    tasks = BackgroundTasks()
    tasks.add_task(abort)
    return tasks


def _known(scheduler: Any) -> list[Any]:
    """Return the requests that an abort looks at, each once."""
    batches = [b for b in (scheduler.running_batch, scheduler.last_batch) if b is not None]
    found = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    found += [req for batch in batches for req in batch.reqs]
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    return list({id(req): req for req in found}.values())
