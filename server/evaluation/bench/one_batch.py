# SPDX-License-Identifier: Apache-2.0
"""SGLang's one_batch benchmark as a child process: command line, driver script, output.

SGLang 0.5.17's ``sglang.benchmark.one_batch`` drives the model runner without a scheduler: it
prefills a static batch and times each decode step. It loads no plugin and prefills a whole batch
in one forward pass, which at 8 x 64K takes more memory than one GPU has. The driver script
that is written beside the results loads plugins where asked and splits the prefill; the decode
loop, which is what is timed, is SGLang's own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandemkv.server.evaluation.provenance import BenchError
from tandemkv.server.evaluation.spread import Spread
from tandemkv.server.pages import LONG_PAGE_TOKENS
from tandemkv.server.plan.shape import ModelShape

from .measured import Measured, Point

DRIVER = '''\
"""Runs sglang.benchmark.one_batch; spawned ranks import this file again."""
import os

if os.environ["BENCH_LOAD_PLUGINS"] == "1":
    from sglang.srt.plugins import load_plugins

    load_plugins()
import sglang.benchmark.one_batch as one_batch

CHUNK = int(os.environ["BENCH_PREFILL_CHUNK"])
_extend = one_batch.extend


def extend(reqs, model_runner):
    """Prefill in chunks of at most CHUNK tokens of the whole batch."""
    per_request = max(1, CHUNK // len(reqs))
    table = model_runner.req_to_token_pool.req_to_token
    while True:
        starts = [len(req.prefix_indices) for req in reqs]
        ends = [len(req.full_untruncated_fill_ids) for req in reqs]
        if any(start + per_request >= end for start, end in zip(starts, ends)):
            break
        for req, start in zip(reqs, starts):
            req.set_extend_range(start, start + per_request)
        _extend(reqs, model_runner)
        for req, start in zip(reqs, starts):
            kept = table[req.req_pool_idx, : start + per_request]
            req.prefix_indices = kept.to(req.prefix_indices.dtype)
    for req, start, end in zip(reqs, starts, ends):
        req.set_extend_range(start, end)
    return _extend(reqs, model_runner)


if CHUNK:
    one_batch.extend = extend

if __name__ == "__main__":
    one_batch.cli_main()
'''
DRIVER_FILE = "one_batch_driver.py"
RESULT_FILE = "one_batch.jsonl"
MIN_CAPACITY_TOKENS = 256
"""Smallest capacity that the settings accept."""

_DECODE = re.compile(r"^Decode \d+\. Batch size: (\d+), latency: +([0-9.]+) s")
_PREFILL = re.compile(r"^Prefill\. latency: +([0-9.]+) s")
_MEDIAN = re.compile(r"^Decode\.  median latency: +([0-9.]+) s")
_SKIPPED = re.compile(r"^skipping \((\d+), (\d+), (\d+)\) due to (.*)$")
_TRACE = re.compile(r"^torch profiler chrome trace .*saved to (.+)$")


def one_batch_argv(
    *,
    work_dir: Path,
    model_dir: Path,
    tokenizer_dir: Path,
    batch: int,
    contexts: Sequence[int],
    output_tokens: int,
    flags: Sequence[str],
    profile: bool = False,
) -> tuple[str, ...]:
    """Return the command line of one run: one batch size, several contexts, in this order.

    `flags` are SGLang's own and come last, so that a configuration has the last word.
    """
    argv = [
        sys.executable, "-P", str(work_dir / DRIVER_FILE),
        "--model-path", str(model_dir),
        "--tokenizer-path", str(tokenizer_dir),
        "--load-format", "dummy",
        "--batch-size", str(batch),
        "--input-len", *map(str, contexts),
        "--output-len", str(output_tokens),
        "--max-total-tokens", str(capacity_tokens(batch, contexts, output_tokens)),
        "--log-decode-step", "1",
        "--result-filename", str(work_dir / RESULT_FILE),
    ]  # fmt: skip
    if profile:
        argv += ["--profile", "--profile-stage", "decode", "--profile-steps", "3"]
    return (*argv, *flags)


def capacity_tokens(batch: int, contexts: Sequence[int], output_tokens: int) -> int:
    """Return the KV capacity of a run: whole pages for each request, and one more.

    Room for five times `output_tokens`, which `decode_steps` needs: it warms up, waits for each
    step once, and queues them three times.
    """
    pages = -(-(max(contexts) + 5 * output_tokens) // LONG_PAGE_TOKENS) + 1
    return max(MIN_CAPACITY_TOKENS, batch * pages * LONG_PAGE_TOKENS)


def write_driver(work_dir: Path) -> None:
    """Write the driver script into `work_dir`."""
    (work_dir / DRIVER_FILE).write_text(DRIVER, encoding="utf-8")


def write_model_config(shape: ModelShape, model_dir: Path, *, max_context: int) -> None:
    """Write a model directory of `shape` that dummy weights can be loaded for.

    Parameters
    ----------
    shape : ModelShape
        The sizes.
    model_dir : Path
        Made if needed; gets ``config.json`` only.
    max_context : int
        Longest request, output included; rounded up to a power of two.
    """
    is_qwen = shape.name.startswith("qwen3")
    config = {
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "model_type": "qwen3" if is_qwen else "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 1 << max(7, (max_context - 1).bit_length()),
        "num_attention_heads": shape.num_qo_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0 if is_qwen else 500000.0,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def parse_output(
    text: str, points: Sequence[Point], jsonl: str = ""
) -> tuple[list[Measured], dict[Point, str]]:
    """Read what one_batch printed, and its result file where it came to write one.

    Of standard output `text`, what precedes ``Benchmark ...`` is warm-up and is not read. `points`
    are in the order in which they were run. The result file `jsonl` has medians to full precision,
    where printed ones have 10 us. A point that is neither measured nor skipped was not reached.

    Raises
    ------
    BenchError
        If the output contradicts `points`.
    """
    _, _, body = text.partition("\nBenchmark ...\n")
    precise = _precise_medians(jsonl)
    waiting = list(points)
    measured: list[Measured] = []
    skipped: dict[Point, str] = {}
    prefill_s: float | None = None
    steps: list[float] = []
    for line in body.splitlines():
        if match := _SKIPPED.match(line):
            point = Point(int(match[1]), int(match[2]))
            _expect(point, waiting)
            skipped[point] = match[4]
        elif match := _PREFILL.match(line):
            prefill_s, steps = float(match[1]), []
        elif match := _DECODE.match(line):
            if waiting and int(match[1]) != waiting[0].batch:
                raise BenchError(
                    f"one_batch ran batch {match[1]} where {waiting[0].batch} was due: its "
                    "output has changed; this reader is for SGLang 0.5.17"
                )
            steps.append(float(match[2]))
        elif (match := _MEDIAN.match(line)) and prefill_s is not None and waiting:
            point = waiting.pop(0)
            median_ms = 1e3 * precise.get(point, float(match[1]))
            waited = replace(Spread.of(steps, scale=1e3), median=median_ms)
            measured.append(Measured(point=point, waited=waited, prefill_s=prefill_s))
            prefill_s = None
    return measured, skipped


def trace_files(text: str) -> tuple[Path, ...]:
    """Return where one_batch saved Chrome traces."""
    return tuple(Path(match[1]) for line in text.splitlines() if (match := _TRACE.match(line)))


def _expect(point: Point, waiting: list[Point]) -> None:
    if not waiting or waiting[0] != point:
        raise BenchError(
            f"one_batch skipped {point.label}, which was not due: its output has changed; this "
            "reader is for SGLang 0.5.17"
        )
    waiting.pop(0)


def _precise_medians(jsonl: str) -> dict[Point, float]:
    found = {}
    for line in jsonl.splitlines():
        item = json.loads(line)
        point = Point(item["batch_size"], item["input_len"])
        found[point] = float(item["median_decode_latency"])
    return found
