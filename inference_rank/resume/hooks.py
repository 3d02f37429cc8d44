# SPDX-License-Identifier: Apache-2.0
"""Where SGLang's scheduler is followed, so that what a lost cache rank cost is done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from tandemkv.inference_rank import runtime as runtime_module

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"


def hooks() -> list[tuple[str, Callable[..., Any], HookType]]:
    """Hooks of the process that runs the model."""
    return [
        (f"{_SCHEDULER}.process_input_requests", before_requests, HookType.BEFORE),
        (f"{_SCHEDULER}._add_request_to_queue", around_queue, HookType.AROUND),
        (f"{_SCHEDULER}.process_batch_result", around_results, HookType.AROUND),
        (
            "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear",
            before_rows_clear,
            HookType.BEFORE,
        ),
        (f"{_RESULTS}.release_kv_cache", around_release, HookType.AROUND),
        (f"{_SCHEDULER}.release_host_resources", say_goodbye, HookType.BEFORE),
        (f"{_SCHEDULER}.pause_generation", after_pause, HookType.AFTER),
        (f"{_SCHEDULER}.continue_generation", after_pause, HookType.AFTER),
        (f"{_BATCH}.cumulate_penalty_output_tokens", around_penalties, HookType.AROUND),
    ]


def before_requests(scheduler: Any, *_: Any, **__: Any) -> None:
    """Run once per turn of the scheduler's loop."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.recovery.turn(scheduler)


def around_queue(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a new request if no cache rank came back for too long; penalties begin anew."""
    runtime = runtime_module.current()
    if runtime is not None:
        if runtime.recovery.refuses(scheduler, req):
            return None
        runtime.penalties.forget(req)  # SGLang itself may have taken it back
    return original(scheduler, req, *args, **kwargs)


def around_results(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Use the results of a pass, or drop them."""
    runtime = runtime_module.current()
    if runtime is None:
        original(scheduler, batch, result)
    else:
        runtime.passes.take(original, scheduler, batch, result)


def around_release(
    original: Callable[..., None], req: Any, tree_cache: Any, *args: Any, **kwargs: Any
) -> None:
    """Keep from the radix tree what a pass stores whose results nobody has looked at."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.recovery.before_release(req, tree_cache)
    original(req, tree_cache, *args, **kwargs)


def after_pause(_result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Tell an administrator's pause from ours."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.recovery.note_pause(scheduler)


def around_penalties(original: Callable[..., None], batch: Any) -> None:
    """Note which tokens penalties are made of."""
    runtime = runtime_module.current()
    if runtime is None:
        original(batch)
    else:
        runtime.penalties.add(original, batch)


def before_rows_clear(_pool: Any, *_: Any, **__: Any) -> None:
    """SGLang's row generations are about to restart at zero."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.before_flush()


def say_goodbye(*_: Any, **__: Any) -> None:
    """End the epoch when the scheduler ends in order: the cache rank need not find out."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.client.close()
