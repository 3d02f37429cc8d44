# SPDX-License-Identifier: Apache-2.0
"""Brings SGLang's requests back to their last accepted tokens, without a forward pass.

Rows, slots, K/V and the radix tree stay as they are; only slots behind the last accepted token are
given back. SGLang's own retraction would compute decoded tokens anew, densely, and continue with
others. Called between two passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from tandemkv.inference_rank.sglang.versions import committed, give_up, retract, row_of, set_stored

from .penalties import PenaltyLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """What was done: requests that decode on, and those whose prompt is computed again.

    `num_rewound` counts the requests that lost a token.
    """

    decoding: tuple[Any, ...]
    prefilled_again: tuple[Any, ...]
    num_rewound: int


def rewind(scheduler: Any, lost: Sequence[Any], penalties: PenaltyLog) -> Rewound:
    """Undo the passes of the `lost` batches.

    Requests whose prompt was in one of them wait at the head of the queue again; those that decode
    are in a new running batch, in their order. `scheduler` is between two turns; `lost` is every
    batch that was launched and whose results were not used.
    """
    prompts = {id(req) for batch in lost for req in _prompts_of(batch)}
    requests = live_requests(scheduler, lost)
    chunked = scheduler.chunked_req
    again = [r for r in requests if id(r) in prompts or not (r.output_ids or r is chunked)]
    rest = [r for r in requests if id(r) not in prompts and r is not chunked]
    decoding = [r for r in rest if r.output_ids]
    num_rewound = sum([_trim(scheduler, req, penalties) for req in decoding])
    for req in reversed(again):
        compute_again(scheduler, req, penalties)
    _replace_batches(scheduler, decode_batch(scheduler, decoding, penalties))
    return Rewound(decoding=tuple(decoding), prefilled_again=tuple(again), num_rewound=num_rewound)


def recompute(scheduler: Any, penalties: PenaltyLog) -> tuple[Any, ...]:
    """Let every request be computed again from its tokens, with an empty radix tree.

    For memory that is gone. Returns the requests; they wait at the head of the queue.
    """
    requests = live_requests(scheduler)
    for req in reversed(requests):
        compute_again(scheduler, req, penalties)
    _replace_batches(scheduler, _no_batch())
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    return tuple(requests)


def end_requests(scheduler: Any, penalties: PenaltyLog) -> tuple[Any, ...]:
    """Give back all that the requests hold that were begun, and forget them; returns them."""
    requests = live_requests(scheduler)
    for req in requests:
        penalties.forget(req)
        give_up(req, scheduler.tree_cache)
    scheduler.chunked_req = scheduler._pending_chunked_abort_req = None
    _replace_batches(scheduler, _no_batch())
    return tuple(requests)


def live_requests(scheduler: Any, lost: Iterable[Any] = ()) -> list[Any]:
    """Return the requests that hold rows, in the order in which they run."""
    found: dict[int, Any] = {}
    for batch in (scheduler.running_batch, scheduler.last_batch, *lost):
        if batch is not None:
            found |= {id(req): req for req in batch.reqs if id(req) not in found}
    if scheduler.chunked_req is not None:
        found.setdefault(id(scheduler.chunked_req), scheduler.chunked_req)
    return [r for r in found.values() if not r.finished() and row_of(r) is not None]


def trim_ended(req: Any, tree_cache: Any) -> None:
    """Give back the slots that passes under way store to for a request that has ended.

    With the overlap scheduler one pass follows the last token. It may be lost, and what it stored
    for that token be anything; the radix tree would give it to a prompt that continues the answer.
    """
    if row_of(req) is not None and committed(req) > _stored(req):
        _give_back(tree_cache, req, _stored(req))


def compute_again(scheduler: Any, req: Any, penalties: PenaltyLog) -> None:
    """Put a request at the head of the queue; what the radix tree has of it is reused."""
    if req is scheduler.chunked_req:
        scheduler.chunked_req = None
    penalties.forget(req)
    _give_back(scheduler, req, len(req.origin_input_ids) + len(req.output_ids))
    retract(req, scheduler)
    if req is scheduler._pending_chunked_abort_req:  # its client is gone
        scheduler._pending_chunked_abort_req = None
        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
        return
    scheduler.waiting_queue.insert(0, req)


def decode_batch(scheduler: Any, requests: Sequence[Any], penalties: PenaltyLog) -> Any:
    """Return a batch that goes on with the last token of each of `requests`.

    As SGLang does it for requests whose K/V came from elsewhere (prebuilt batches).
    """
    if not requests:
        return _no_batch()
    if not any(penalties.tokens(req) for req in requests):
        return _batch_of(scheduler, list(requests))
    whole: Any = None
    for req in requests:  # penalties are made for a batch at once: one request each, then merged
        batch = _batch_of(scheduler, [req])
        penalties.replay(req, batch)
        if whole is None:
            whole = batch
        else:
            whole.merge_batch(batch)
    return whole


def _batch_of(scheduler: Any, requests: list[Any]) -> Any:
    batch = ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        model_config=scheduler.model_config,
        enable_overlap=scheduler.enable_overlap,
        spec_algorithm=scheduler.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    rows = [row_of(req) for req in requests]
    lengths = [_stored(req) for req in requests]
    device = batch.device
    batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.multimodal_inputs = [req.multimodal_inputs for req in requests]
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in requests]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in requests]
    latest = torch.tensor([r.output_ids[-1] for r in requests], dtype=torch.int64, device=device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=latest))
    batch.input_ids = None
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(
        batch, scheduler.model_config.vocab_size
    )
    return batch


def _replace_batches(scheduler: Any, running: Any) -> None:
    scheduler.running_batch, scheduler.last_batch = running, None
    scheduler.cur_batch_for_debug = None
    if scheduler.enable_overlap:
        scheduler.result_queue.clear()


def _no_batch() -> Any:
    return ScheduleBatch(reqs=[], batch_is_full=False)


def _prompts_of(batch: Any) -> list[Any]:
    if not batch.forward_mode.is_extend():
        return []
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    return [req for req in batch.reqs if id(req) not in decoding]


def _stored(req: Any) -> int:
    """Tokens whose K/V are computed where all output tokens but the last were taken in."""
    return len(req.origin_input_ids) + len(req.output_ids) - 1


def _trim(scheduler: Any, req: Any, penalties: PenaltyLog) -> bool:
    """Give back what was allocated for tokens that were not accepted; whether there were any."""
    steps = committed(req) - _stored(req)
    _give_back(scheduler, req, _stored(req))
    req.decode_batch_idx -= steps
    penalties.rewind(req, steps)
    return steps > 0


def _give_back(pools: Any, req: Any, stored: int) -> None:
    """Free what is allocated behind the first `stored` tokens of a request.

    `pools` is the scheduler or the radix tree: either has both.
    """
    end = req.kv.kv_allocated_len
    if end <= stored:
        return
    allocator = pools.token_to_kv_pool_allocator
    first = -(-stored // allocator.page_size) * allocator.page_size
    if first < end:
        slots = pools.req_to_token_pool.req_to_token[row_of(req), first:end]
        allocator.free_segment(slots.clone(), start_pos=first)
    set_stored(req, stored)
