# SPDX-License-Identifier: Apache-2.0
"""Decode steps of SGLang's model runner over long contexts, without their prefill.

    python -m tandemkv.inference_rank.decode_bench --points 8x65536 --out FILE <SGLang arguments>

What a step costs depends on how much K/V there is, not on what it says. So each request's
slots are allocated as a prefill would, the pool holds random K/V, and only decode runs:
through ``ModelRunner.forward``, hence through SGLang's CUDA graph, with SGLang's own backend
(``--attention-backend flashinfer``) or ours. Two figures a point: steps that are waited for
one by one, as SGLang's ``one_batch`` times them, and steps queued one behind another, as its
overlap scheduler runs them.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.benchmark import one_batch
from sglang.srt.model_loader import loader
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs

from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.step_trace import traced_beside
from tandemkv.inference_rank.sglang.live_model import own_backend

from . import runtime as runtime_module

_LOG = logging.getLogger(__name__)
_WARMUP_STEPS = 8
_PROMPTS_S = 120.0
_FILLED_AT_ONCE = 1 << 16
_EMBEDDING = "embed_tokens.weight"
_ENOUGH = 1024
"""Rows of an embedding that tell how it was filled."""


def main() -> None:
    """Parse, start one process per tensor-parallel rank, measure."""
    load_plugins()  # our backend's name is one of the choices
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", required=True, help="batch x context, e.g. 8x65536,1x8192")
    parser.add_argument("--steps", type=int, default=24, help="decode steps per figure")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument(
        "--extra-streams", type=int, default=0,
        help="CUDA streams, 32 at most, that are used once before the measurement: decision 14",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, help="folder for Chrome traces of three steps a point"
    )
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args()
    pairs = [point.split("x") for point in args.points.split(",")]
    points = [(int(batch), int(context)) for batch, context in pairs]
    server_args = ServerArgs.from_cli_args(args)
    one_batch._set_envs_and_config(server_args)
    job = (args, points, server_args, PortArgs.init_new(server_args))
    if server_args.tp_size == 1:
        run_rank(*job, 0)
        return
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(*job, r)) for r in range(server_args.tp_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit("a tensor-parallel rank failed; its traceback is above")


def run_rank(
    args: argparse.Namespace, points: list[tuple[int, int]], server_args: Any, port_args: Any,
    tp_rank: int,
) -> None:  # fmt: skip
    """Measure every point on one rank; rank 0 writes the file after each."""
    load_plugins()
    fill_dummies()
    bench, _ = one_batch.load_model(server_args, port_args, tp_rank, tp_rank)
    runner = bench.torch_runner
    if server_args.load_format == "dummy":
        require_filled(runner.model)
    fill_pool(runner)
    for stream in [torch.cuda.Stream() for _ in range(args.extra_streams)]:
        with torch.cuda.stream(stream):
            torch.ones(1, device=runner.device).add_(1)
    found: list[dict[str, Any]] = []
    for batch_size, context in points:
        try:
            point = measure(runner, batch_size, context, args.steps)
        except torch.cuda.OutOfMemoryError as error:
            point = {"batch": batch_size, "context": context, "error": str(error)[:200]}
        found.append(point)
        if tp_rank == 0:
            _LOG.warning("%s", json.dumps(point))
            args.out.write_text(json.dumps(found, indent=1))
        if args.trace is not None and "error" not in point:  # what is measured stays
            try:
                write_trace(runner, batch_size, context, args.trace, tp_rank)
            except torch.cuda.OutOfMemoryError as error:
                _LOG.warning("not traced: %s", str(error)[:200])


def fill_dummies() -> None:
    """Let models with dummy weights have norms of weight one and normal embeddings, from now on.

    Dummy weights are within a thousandth of zero. Queries would be as small, and all logits so
    nearly equal that what is selected were a question of their last bits. And the stream would be
    little but what attention adds to it: how many experts the requests of a batch have among them
    would differ with what they attend to, by a sixth between dense attention and a selection. With
    such embeddings it is the tokens' own, and experts are those of texts that have nothing in
    common. (Where the output matrix is the embedding, each request repeats its token, and its
    experts.) It has to be done as the model is loaded: a cache rank on another GPU keeps copies.
    """
    stock = loader.initialize_dummy_weights

    def initialize(model: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        stock(model, *arguments, **options)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):
                    weight.fill_(1)
                elif name.endswith(_EMBEDDING):
                    weight.normal_(generator=torch.Generator(weight.device).manual_seed(0))

    loader.initialize_dummy_weights = initialize


def require_filled(model: torch.nn.Module) -> None:
    """Stop where a weight is not as `fill_dummies` makes it."""
    for name, weight in model.named_parameters():
        is_one = not name.endswith("norm.weight") or bool((weight == 1).all())
        is_normal = not name.endswith(_EMBEDDING) or weight[:_ENOUGH].float().std() > 0.5
        if not (is_one and is_normal):
            raise RuntimeError(
                f"{name} is as SGLang made it, which does not load dummy weights by fill_dummies"
            )


def fill_pool(runner: Any) -> None:
    """Put random K/V into every slot."""
    for layer in range(runner.model_config.num_hidden_layers):
        for pool in runner.token_to_kv_pool.get_kv_buffer(layer):
            for part in pool.split(_FILLED_AT_ONCE):  # FP8 is not drawn directly
                part.copy_(torch.randn(part.shape, device=pool.device, dtype=runner.dtype))


def prepare(runner: Any, batch_size: int, context: int) -> Any:
    """Return a batch whose requests have `context` tokens, as after a prefill."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    ids = np.ones((batch_size, context), dtype=np.int32)
    tree = one_batch.TreeCacheNamespace(
        page_size=runner.server_args.page_size,
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )
    batch = ScheduleBatch.init_new(
        reqs=one_batch.prepare_synthetic_inputs_for_latency_test(batch_size, context, list(ids)),
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=tree,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    adopt = getattr(own_backend(runner.attn_backend), "adopt", None)
    if adopt is not None:
        started = time.perf_counter()
        adopt(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))
        await_prompts(runner)
        _LOG.warning("prompts are indexed after %.2f s", time.perf_counter() - started)
    return batch


def await_prompts(runner: Any) -> None:
    """Wait until a cache rank in another process has indexed the prompts, and sent their sets.

    All of their K/V at once take a link longer than the first decode step would wait. Raises
    `RuntimeError`, with how far it has come, if it will not or does not in time.
    """
    runtime = runtime_module.current()
    client = None if runtime is None else runtime.client
    if client is None or client.parts[0].tensors.homes.here.type != "cuda":
        return
    num_layers, count = runner.model_config.num_hidden_layers, len(client.parts)
    flags, step = GpuFlags(client.parts[0].tensors, num_layers), client.step
    deadline = time.monotonic() + _PROMPTS_S
    while bool((flags.all_finished(count) < step).any()):
        if not runner.attn_backend.link.is_done(step):
            why = client.lost_reason or "the forward pass waited for a layer in vain"
        elif time.monotonic() > deadline:
            why = f"{_PROMPTS_S:g} s have passed"
        else:
            time.sleep(0.01)
            continue
        ready = [bool((flags.all_ready(x, count) >= step).all()) for x in range(num_layers)]
        raise RuntimeError(
            f"the cache rank has not got the prompts of step {step}, {sum(ready)} of {num_layers} "
            f"layers are ready: {why}; see pump.log and cache_rank.log"
        )


def warmed_up(runner: Any, batch_size: int, context: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a batch after some steps, its tokens and logits."""
    batch = prepare(runner, batch_size, context)
    token = torch.arange(1, batch_size + 1, dtype=torch.int64, device=runner.device)
    for _ in range(_WARMUP_STEPS):
        token, logits = one_batch.decode(token, batch, runner)
    torch.cuda.synchronize()
    return batch, token, logits


def measure(runner: Any, batch_size: int, context: int, steps: int) -> dict[str, Any]:
    """Time the decode steps of one point, in ms per step."""
    batch, token, logits = warmed_up(runner, batch_size, context)
    digest = logits.double().abs().sum().item()
    waited = []
    for _ in range(steps):
        start = time.perf_counter()
        token, _ = one_batch.decode(token, batch, runner)
        torch.cuda.synchronize()
        waited.append(1e3 * (time.perf_counter() - start))
    queued = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            token, _ = one_batch.decode(token, batch, runner)
        torch.cuda.synchronize()
        queued.append(1e3 * (time.perf_counter() - start) / steps)
    require_cache_rank()
    return {
        "batch": batch_size,
        "context": context,
        "waited_ms": summary(waited),
        "queued_ms": summary(queued),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        # Equal figures of two placements: to the bit, they attended to the same tokens.
        "logits_sum": digest,
        "counters": counters(),
        "devices": device_names(runner),
    }


def device_names(runner: Any) -> list[str]:
    """Return the GPUs that work, by name: those of the model, then those of the engine, if any.

    By messages the engine's GPU is another host's, and not known here.
    """
    size = int(runner.server_args.tp_size)
    found = [("model", index) for index in range(size)]
    backend = own_backend(runner.attn_backend)
    engine: torch.device | None = getattr(backend, "cache_device", None)
    runtime = runtime_module.current()
    if runtime is not None and runtime.settings.placement.has_far_host:
        engine = None
    if engine is not None:
        first = 0 if engine.index is None else engine.index
        client = getattr(runtime, "client", None)
        count = size * (1 if client is None else len(client.parts))
        found += [("engine", first + index) for index in range(count)]
    return [f"{role} on cuda:{index} {torch.cuda.get_device_name(index)}" for role, index in found]


def counters() -> dict[str, float]:
    """Return what the engine has counted, wherever it is; nothing for stock SGLang.

    Of several engines the sum of each total, and the largest of what is none.
    """
    runtime = runtime_module.current()
    if runtime is None:
        return {}
    if runtime.client is None:
        found: dict[str, float] = runtime.rank.counters()
        return found
    run_dir = runtime_module.run_dir_from_environment()
    sockets = [run_dir.of_rank(n).heartbeat_socket for n in range(len(runtime.client.parts))]
    told = [request_status(socket, 5.0).values for socket in sockets]
    together = {
        name: (sum if name.endswith("_total") else max)(values[name] for values in told)
        for name in told[0]
    }
    return {name: value for name, value in together.items() if value}


def require_cache_rank() -> None:
    """Stop where the cache rank's process was lost: what was timed then selects nothing."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.client is not None and runtime.client.lost_reason:
        raise RuntimeError(f"the cache rank was lost: {runtime.client.lost_reason}")


def summary(values: list[float]) -> dict[str, float]:
    """Median, p10 and p90."""
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"median": round(median, 3), "p10": round(p10, 3), "p90": round(p90, 3)}


def num_cache_ranks() -> int:
    """Return how many cache ranks link `shared` leads to: those that can trace their steps."""
    runtime = runtime_module.current()
    if runtime is None or runtime.settings.placement.link != "shared":
        return 0
    # Those of several inference ranks would be told the same name by each.
    return len(runtime.client.parts) if runtime.settings.placement.tp_size == 1 else 0


def write_trace(runner: Any, batch_size: int, context: int, folder: Path, tp_rank: int) -> None:
    """Write a Chrome trace of three queued steps, and a table of their kernels.

    Cache ranks of this host write theirs beside it.
    """
    from torch.profiler import ProfilerActivity, profile

    batch, token, _ = warmed_up(runner, batch_size, context)
    point = f"decode_{batch_size}x{context}"
    with (
        traced_beside(folder, point, num_cache_ranks()),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
    ):
        for _ in range(3):
            token, _ = one_batch.decode(token, batch, runner)
        torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{point}_rank{tp_rank}"
    profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
    table = profiler.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70
    )
    (folder / f"{name}.txt").write_text(table)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
