# SPDX-License-Identifier: Apache-2.0
"""Command lines for one_batch and its output, recorded from SGLang 0.5.17."""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.exchange_settings import CacheSettings
from tandemkv.cache_rank.protocol.model_spec import read_model_spec
from tandemkv.server.evaluation.bench.measured import Point
from tandemkv.server.evaluation.bench.one_batch import (
    DRIVER,
    capacity_tokens,
    one_batch_argv,
    parse_output,
    trace_files,
    write_model_config,
)
from tandemkv.server.evaluation.bench.report import BenchError
from tandemkv.server.plan.shape import BUILT_IN_SHAPES, find_shape

# SmolLM2-135M with dummy weights on a CPU, --batch-size 1 2 --input-len 64 1024 --output-len 8,
# --max-total-tokens 1100, some decode lines left out.
RECORDED = """\
max_total_num_tokens=1100
Warmup ...
Prefill. latency: 0.22562 s, throughput:    283.66 token/s
Decode 0. Batch size: 1, latency: 0.04965 s, throughput:     20.14 token/s
Decode.  median latency: 0.04900 s, median throughput:     20.41 token/s
Total. latency:  0.584 s, throughput:    123.26 token/s
Benchmark ...
Prefill. latency: 0.30654 s, throughput:    208.78 token/s
Decode 0. Batch size: 1, latency: 0.12668 s, throughput:      7.89 token/s
Decode 1. Batch size: 1, latency: 0.11247 s, throughput:      8.89 token/s
Decode 2. Batch size: 1, latency: 0.11821 s, throughput:      8.46 token/s
Decode.  median latency: 0.11821 s, median throughput:      8.46 token/s
Total. latency:  1.134 s, throughput:     63.49 token/s
Prefill. latency: 5.58596 s, throughput:    183.32 token/s
Decode 0. Batch size: 1, latency: 0.06002 s, throughput:     16.66 token/s
torch profiler chrome trace for decode saved to /work/trace_decode.trace.json.gz
Decode 1. Batch size: 1, latency: 0.05731 s, throughput:     17.45 token/s
Decode.  median latency: 0.05767 s, median throughput:     17.34 token/s
Total. latency:  5.992 s, throughput:    172.23 token/s
Prefill. latency: 0.37758 s, throughput:    339.00 token/s
Decode 0. Batch size: 2, latency: 0.07441 s, throughput:     26.88 token/s
Decode.  median latency: 0.07796 s, median throughput:     25.65 token/s
Total. latency:  0.921 s, throughput:    156.39 token/s
skipping (2, 1024, 8) due to max batch size limit
"""
JSONL = (
    '{"run_name": "tiny", "batch_size": 1, "input_len": 64, "output_len": 8, '
    '"median_decode_latency": 0.11821205200067197}\n'
)
POINTS = (Point(1, 64), Point(1, 1024), Point(2, 64), Point(2, 1024))


def test_reads_the_recorded_output() -> None:
    measured, skipped = parse_output(RECORDED, POINTS, JSONL)
    assert [item.point for item in measured] == list(POINTS[:3])
    assert [item.prefill_s for item in measured] == [0.30654, 5.58596, 0.37758]
    assert measured[0].waited.median == 118.21205200067197  # from the result file
    assert measured[1].waited.median == pytest.approx(57.67)
    assert [item.waited.n for item in measured] == [3, 2, 1]  # the warm-up's are not in it
    assert measured[1].waited.p10 == pytest.approx(57.31 + 0.1 * (60.02 - 57.31))
    assert skipped == {Point(2, 1024): "max batch size limit"}


def test_a_run_that_broke_off_gives_what_it_finished() -> None:
    upto = RECORDED[: RECORDED.index("Prefill. latency: 0.37758")]
    measured, skipped = parse_output(upto + "Prefill. latency: 0.4 s, ", POINTS)
    assert [item.point for item in measured] == list(POINTS[:2])
    assert skipped == {}
    assert parse_output("Warmup ...\nPrefill. latency: 0.2 s\n", POINTS) == ([], {})


def test_output_that_contradicts_the_request_is_refused() -> None:
    with pytest.raises(BenchError, match="ran batch 1 where 4 was due"):
        parse_output(RECORDED, (Point(4, 64),))
    with pytest.raises(BenchError, match="skipped 2x1k"):
        parse_output(RECORDED, (*POINTS[:3], Point(2, 2048)))


def test_traces_are_found() -> None:
    assert trace_files(RECORDED) == (Path("/work/trace_decode.trace.json.gz"),)


def test_argv() -> None:
    argv = one_batch_argv(
        work_dir=Path("/w"), model_dir=Path("/m"), tokenizer_dir=Path("/t"), batch=8,
        contexts=[8192, 65536], output_tokens=32, flags=("--tp-size", "2"), profile=True,
    )  # fmt: skip
    assert argv[1:3] == ("-P", "/w/one_batch_driver.py")
    assert argv[-2:] == ("--tp-size", "2")
    at = argv.index("--input-len")
    assert argv[at + 1 : at + 3] == ("8192", "65536")
    most = 8 * (65536 + 3 * 128)  # room for 5 x 32, and a page
    assert argv[argv.index("--max-total-tokens") + 1] == str(most)
    assert argv[argv.index("--load-format") + 1] == "dummy"
    assert argv[argv.index("--profile-stage") + 1] == "decode"


def test_argv_is_what_sglang_parses() -> None:
    """Every flag of ours and of the built-in configurations exists in the pinned SGLang."""
    one_batch = pytest.importorskip("sglang.benchmark.one_batch")
    from tandemkv.server.evaluation.bench.configurations import BUILT_IN

    for configuration in BUILT_IN.values():
        parser = argparse.ArgumentParser()
        one_batch.ServerArgs.add_cli_args(parser)
        one_batch.BenchArgs.add_cli_args(parser)
        given = configuration.sglang_flags(model_dir=Path("/m"), capacity_tokens=4096, batch=8)
        flags = ["triton" if word == "tandemkv" else word for word in given]
        argv = one_batch_argv(
            work_dir=Path("/w"), model_dir=Path("/m"), tokenizer_dir=Path("/t"), batch=8,
            contexts=[64], output_tokens=4, flags=flags, profile=True,
        )  # fmt: skip
        parsed = parser.parse_args(argv[3:])
        assert parsed.tp_size == configuration.tp_size
        assert parsed.batch_size == [8]


@pytest.mark.parametrize(
    ("batch", "contexts", "tokens", "capacity"),
    [(8, [8192, 65536], 32, 8 * (65536 + 384)), (2, [64, 128], 4, 2 * 384), (1, [1], 2, 256)],
)
def test_capacity_is_whole_pages_and_one_that_the_settings_accept(
    batch: int, contexts: list[int], tokens: int, capacity: int
) -> None:
    assert capacity_tokens(batch, contexts, tokens) == capacity
    CacheSettings(capacity_tokens=capacity)


@pytest.mark.parametrize(
    ("point", "label"),
    [(Point(8, 65536), "8x64k"), (Point(1, 1000), "1x1000"), (Point(64, 1024), "64x1k")],
)
def test_labels(point: Point, label: str) -> None:
    assert point.label == label


@pytest.mark.parametrize("name", list(BUILT_IN_SHAPES))
def test_a_written_config_is_read_back_as_the_same_shape(name: str, tmp_path: Path) -> None:
    write_model_config(BUILT_IN_SHAPES[name], tmp_path, max_context=65536 + 32)
    shape = find_shape(str(tmp_path))
    assert shape.weight_bytes == BUILT_IN_SHAPES[name].weight_bytes
    assert shape.kv_token_bytes == BUILT_IN_SHAPES[name].kv_token_bytes
    spec = read_model_spec(tmp_path, dtype="bfloat16")
    assert spec.max_context == 131072
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] > 0


def test_the_driver_is_python_and_chunks_by_its_variable() -> None:
    tree = ast.parse(DRIVER)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "extend" for node in tree.body)
    for variable in ("BENCH_LOAD_PLUGINS", "BENCH_PREFILL_CHUNK"):
        assert variable in DRIVER
