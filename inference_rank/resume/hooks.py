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
    note, wrap = runtime_module.noted, runtime_module.around
    before = {
        # Once per turn of the scheduler's loop.
        f"{_SCHEDULER}.process_input_requests": note(
            lambda runtime, scheduler, *_: runtime.recovery.turn(scheduler)
        ),
        # SGLang's row generations are about to restart at zero.
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear": note(
            lambda runtime, *_: runtime.before_flush()
        ),
        # The scheduler ends in order: the cache rank need not find out.
        f"{_SCHEDULER}.release_host_resources": note(lambda runtime, *_: runtime.client.close()),
    }
    around = {
        f"{_SCHEDULER}._add_request_to_queue": around_queue,
        f"{_SCHEDULER}.process_batch_result": wrap(
            lambda runtime, *given: runtime.passes.take(*given)
        ),
        f"{_RESULTS}.release_kv_cache": around_release,
        f"{_BATCH}.cumulate_penalty_output_tokens": wrap(
            lambda runtime, *given: runtime.penalties.add(*given)
        ),
    }
    # To tell an administrator's pause from ours.
    after_pause = note(
        lambda runtime, _result, scheduler, *_: runtime.recovery.note_pause(scheduler)
    )
    return [
        *((target, hook, HookType.BEFORE) for target, hook in before.items()),
        *((target, hook, HookType.AROUND) for target, hook in around.items()),
        (f"{_SCHEDULER}.pause_generation", after_pause, HookType.AFTER),
        (f"{_SCHEDULER}.continue_generation", after_pause, HookType.AFTER),
    ]


@runtime_module.around
def around_queue(
    runtime: Any, original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a new request if no cache rank came back for too long; penalties begin anew."""
    if runtime.recovery.refuses(scheduler, req):
        return None
    runtime.penalties.forget(req)  # SGLang itself may have taken it back
    return original(scheduler, req, *args, **kwargs)


@runtime_module.around
def around_release(
    runtime: Any, original: Callable[..., None], req: Any, tree_cache: Any, *args: Any,
    **kwargs: Any,
) -> None:  # fmt: skip
    """Keep from the radix tree what a pass stores whose results nobody has looked at."""
    runtime.recovery.before_release(req, tree_cache)
    original(req, tree_cache, *args, **kwargs)
