# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests, batches, pools and radix tree around a model that is a hash of its context.

The next token depends on every token and position that is stored at the slots of a request's row,
so that a wrong slot, length, input token or penalty shows in all that follows.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import scheduler_calls as calls
import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload, resolve_forward_inputs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.base import StepLostError
from tandemkv.inference_rank.resume.agreement import Agreement
from tandemkv.inference_rank.resume.passes import PassLog
from tandemkv.inference_rank.resume.penalties import PenaltyLog
from tandemkv.inference_rank.resume.rewind import trim_ended

VOCABULARY, SLOTS, ROWS, CONTEXT = 97, 400, 8, 128
Fault = str
"""``void``: the pass breaks off. ``late``: it runs through, but the engine does not finish."""


class Engine:
    """Stands in for connection, link and backend; loses the passes that it is told to."""

    def __init__(self, faults: dict[int, Fault]) -> None:
        self.faults, self.number = faults, 0
        self.pass_step: int | None = None
        self.is_void = self.breaks_off = False
        self.steps_begun = 0
        self.confirmed: list[int] = []

    def begin(self) -> None:
        self.number += 1
        self.steps_begun += 1
        self.pass_step = self.number
        self.is_void = self.faults.get(self.number) == "void"
        if self.is_void and self.breaks_off:
            raise StepLostError("told to")

    def is_done(self, step: int) -> bool:
        return self.faults.get(step) != "late"

    def confirm(self, step: int) -> None:
        self.confirmed.append(step)

    def snapshot(self) -> tuple[Any, ...]:
        return (self.steps_begun,)

    def rewind(self, state: tuple[Any, ...] = (None,)) -> None:
        if state[0] is not None:
            self.steps_begun = state[0]


class World:
    """What `rewind` sees of SGLang's scheduler, and the two loops that drive it."""

    def __init__(
        self,
        faults: dict[int, Fault] | None = None,
        *,
        overlap: bool = False,
        page_size: int = 1,
        chunk: int = 64,
        is_queued: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        """With `is_queued` passes end, and leave tokens, when they are waited for: as on a GPU."""
        self.server_args = ServerArgs(
            model_path="dummy", device="cpu", load_format="dummy", attention_backend="torch_native"
        )
        publish(self.server_args, role="test")
        torch.manual_seed(1)
        self.enable_overlap, self.chunk = overlap, chunk
        self.req_to_token_pool = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        pool = SimpleNamespace(size=SLOTS, page_size=page_size, device="cpu", store_dtype=None)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(
            SLOTS, torch.float32, "cpu", pool, False
        )
        self.tree_cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=page_size,
            )
        )
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False)
        self.spec_algorithm = SpeculativeAlgorithm.from_string(None)
        self.future_map = FutureMap("cpu", self.spec_algorithm, self.req_to_token_pool)
        self.stored = torch.zeros(SLOTS + 1, dtype=torch.int64)
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch: Any = None
        self.chunked_req: Any = None
        self._pending_chunked_abort_req: Any = None
        self.cur_batch_for_debug: Any = None
        self._engine_paused = False
        self.waiting_queue: list[Any] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.result_queue: deque[Any] = deque()
        self.forward_ct = 0
        self.sent: list[Any] = []
        to_tokenizer = SimpleNamespace(send_output=lambda out, _req: self.sent.append(out))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=to_tokenizer)
        self.counters, self.penalties = Counters(), PenaltyLog()
        self.engine = Engine(faults or {})
        self.passes = PassLog(self.engine, self.engine, self.engine, self.counters, agreement)
        self.requests: list[Any] = []
        self.before_turn: Callable[[World], None] = lambda _: None
        self.is_queued = is_queued
        self._relays: deque[Callable[[], None]] = deque()
        self._num_ended = 0

    def add(self, prompt: list[int], new_tokens: int, **sampling: Any) -> Any:
        """Let a request wait."""
        chosen = {"temperature": 0.0, **sampling}
        least = chosen.pop("min_new_tokens", 0)
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **chosen)
        params.normalize(None)
        params.min_new_tokens = least
        req = Req(f"r{len(self.requests)}", "", array("q", prompt), params, vocab_size=VOCABULARY)
        req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0)
        req.time_stats = SimpleNamespace()
        self.waiting_queue.append(req)
        self.requests.append(req)
        return req

    def maybe_send_health_check_signal(self) -> None:
        """Nobody asks."""

    # -- the loops -----------------------------------------------------------------------

    def run(self, most_turns: int = 500) -> list[list[int]]:
        """Run until all requests have ended; returns their tokens."""
        for _ in range(most_turns):
            self.before_turn(self)
            if self._engine_paused:
                continue
            batch = self.next_batch()
            if self.enable_overlap:
                result = None
                if batch is not None:
                    result = self.launch(batch)
                    self.result_queue.append((batch.copy(), result))
                if self.last_batch is not None and self.result_queue:
                    self.take(*self.result_queue.popleft())
            elif batch is not None:
                self.take(batch, self.launch(batch))
            self.last_batch = batch
            if batch is None and not self.waiting_queue and not self.passes.dropped:
                return [list(req.output_ids) for req in self.requests]
        raise AssertionError("requests hang")

    def next_batch(self) -> Any:
        """As `Scheduler.get_next_batch_to_run`, for what is used here."""
        last, running = self.last_batch, self.running_batch
        if self.chunked_req is not None:
            calls.checkpoint(self.chunked_req, self.tree_cache, is_chunk=True)
        if last is not None and last.forward_mode.is_extend():
            left_out = [r for r in (last.chunked_req, self.chunked_req) if r is not None]
            calls.leave_out(last, left_out)
            if not last.is_empty():
                if running.is_empty():
                    running = last
                else:
                    running.merge_batch(last)
        self.running_batch = running
        prompts = self._prompts()
        if prompts:
            batch = self._new(prompts, chunked_req=self.chunked_req)
            batch.prepare_for_extend()
            return batch
        calls.leave_out(running, calls.ending(running, self.result_queue))
        if running.is_empty():
            return None
        running.prepare_for_decode()
        return running

    def _prompts(self) -> list[Any]:
        chosen, left = [], self.chunk
        if self.chunked_req is not None:
            req = self.chunked_req
            req.init_next_round_input()
            self.chunked_req = None
            left = self._begin(req, left)
            chosen.append(req)
        while self.waiting_queue and left > 0 and len(chosen) < 2 and self.chunked_req is None:
            if not self.req_to_token_pool.free_slots:
                break
            req = self.waiting_queue.pop(0)
            req.init_next_round_input(self.tree_cache)
            calls.lock(req, self.tree_cache)
            left = self._begin(req, left)
            chosen.append(req)
        if self.chunked_req is not None:
            self.chunked_req.inflight_middle_chunks += 1
        return chosen

    def _begin(self, req: Any, left: int) -> int:
        prefix, whole = calls.start_of(req), len(req.full_untruncated_fill_ids)
        end = min(whole, prefix + left)
        calls.compute_up_to(req, end)
        if end < whole:
            self.chunked_req = req
        return left - (end - prefix)

    def _new(self, requests: list[Any], **kwargs: Any) -> Any:
        return ScheduleBatch.init_new(
            requests,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
            **kwargs,
        )

    # -- passes --------------------------------------------------------------------------

    def launch(self, batch: Any) -> Any:
        return self.passes.run(World._run_batch, self, batch)

    def take(self, batch: Any, result: Any) -> None:
        self.passes.take(World._process, self, batch, result)

    def _run_batch(self, batch: Any) -> Any:
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        self._end_passes(
            self._num_ended + len(self._relays)
        )  # a stream does one thing after the other
        resolve_forward_inputs(batch, self.future_map)
        info = batch.sampling_info
        if self.enable_overlap:
            info = info.copy_for_forward()
        # K/V of a pass that breaks off may be anything.
        self.stored[batch.out_cache_loc] = -7
        self.engine.begin()
        positions = torch.cat(
            [torch.arange(calls.start_of(r), calls.end_of(r)) for r in batch.reqs]
            if batch.forward_mode.is_extend()
            else [batch.seq_lens - 1]
        )
        self.stored[batch.out_cache_loc] = batch.input_ids * 1000 + positions
        logits = torch.stack(
            [
                self._logits(int(row), int(length))
                for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True)
            ]
        )
        info.apply_logits_bias(logits)
        tokens = logits.argmax(-1)
        if not info.is_all_greedy:
            probabilities = torch.softmax(logits / info.temperatures, -1)
            drawn = torch.multinomial(probabilities, 1)[:, 0]
            tokens = torch.where(info.top_ks <= 1, tokens, drawn)
        payload = RelayPayload(bonus_tokens=tokens)
        self._relays.append(partial(self.future_map.stash, batch.req_pool_indices, payload))
        batch.input_ids = None
        number = self._num_ended + len(self._relays)
        if not self.is_queued:
            self._end_passes(number)
            return GenerationBatchResult(next_token_ids=tokens)
        event: Any = SimpleNamespace(synchronize=partial(self._end_passes, number))
        return GenerationBatchResult(next_token_ids=tokens, copy_done=event)

    def _end_passes(self, last: int) -> None:
        """Let passes end up to number `last`, in their order."""
        while self._num_ended < last:
            self._relays.popleft()()
            self._num_ended += 1

    def _logits(self, row: int, length: int) -> torch.Tensor:
        stored = self.stored[self.req_to_token_pool.req_to_token[row, :length].long()]
        weights = torch.arange(1, length + 1) ** 2 + 13
        seed = int((stored * weights).sum()) % (1 << 31)
        return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2

    def _process(self, batch: Any, result: Any) -> None:
        is_extend = batch.forward_mode.is_extend()
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            if req.finished() or req.is_retracted:
                continue
            if is_extend and req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(token)
            req.update_finish_state()
            if req.finished():
                trim_ended(req, self.tree_cache)  # as `resume.hooks` has it
                calls.end(req, self.tree_cache)
            elif is_extend:
                calls.checkpoint(req, self.tree_cache)

    def check_nothing_is_left(self) -> None:
        """Every row and slot is free, or the radix tree's, which gives it up."""
        assert len(self.req_to_token_pool.free_slots) == ROWS
        held = self.tree_cache.total_size()
        assert self.token_to_kv_pool_allocator.available_size() + held == SLOTS
        assert self.tree_cache.protected_size() == 0
