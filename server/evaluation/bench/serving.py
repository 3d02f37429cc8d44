# SPDX-License-Identifier: Apache-2.0
"""Load on a running server, on this machine only: ``sglang.bench_serving`` as a child process."""

from __future__ import annotations

import json
import random
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.provenance import BenchError
from tandemkv.server.evaluation.request_options import option
from tandemkv.server.launch.probes import server_address
from tandemkv.server.settings.launch_settings import is_loopback

from .report import Failure, OutOption, Row, Spread, check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """Options of ``bench serve``: requests of one length, `concurrency` at a time."""

    tokenizer: Annotated[str, option("Directory with the served model's tokenizer, or smollm2.")]
    url: Annotated[str, option("Server on this machine.")] = "http://127.0.0.1:30000"
    name: Annotated[str, option("Part of the rows' names.")] = "serve"
    input_tokens: Annotated[int, option("Tokens of each prompt.", min=1)] = 4096
    output_tokens: Annotated[int, option("Tokens of each answer.", min=2)] = 128
    concurrency: Annotated[int, option("Requests at the same time.", min=1)] = 8
    requests: Annotated[int, option("Requests that are measured.", min=1, max=100000)] = 32
    seed: Annotated[
        int | None,
        option(
            "Of the prompts; default: another each time, for the cache has the last ones.", min=0
        ),
    ] = None
    timeout_s: Annotated[float, option("Longest run, in seconds.", min=1)] = 1800.0
    out: OutOption = None

    def __post_init__(self) -> None:
        """Refuse a target that is not this machine, or a name that rows cannot have."""
        check_name(self.name)
        if self.seed is None:
            object.__setattr__(self, "seed", random.randrange(1 << 31))
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"url={self.url}: an address such as http://127.0.0.1:30000")
        if not is_loopback(parts.hostname):
            raise SettingsError(
                f"url={self.url}: only a server on this machine is put under load; use 127.0.0.1"
            )

    @property
    def label(self) -> str:
        """Return what the rows are named by."""
        return f"{self.name}_{self.concurrency}x{self.input_tokens}"


def bench_serving_argv(load: ServeLoad, tokenizer_dir: Path, result: Path) -> tuple[str, ...]:
    """Return the command line of ``sglang.bench_serving`` (0.5.17).

    Prompts are random token ids, as many as stated, sent as text: nothing is downloaded. Read again
    they may be more tokens (33.5K of 32000 with SmolLM2's tokenizer).
    """
    return (
        sys.executable, "-P", "-m", "sglang.bench_serving",
        "--backend", "sglang",
        "--base-url", server_address(load.url),
        "--dataset-name", "random-ids",
        "--tokenizer", str(tokenizer_dir),
        "--random-input-len", str(load.input_tokens),
        "--random-output-len", str(load.output_tokens),
        "--random-range-ratio", "1.0",
        "--num-prompts", str(load.requests + 1),  # the first one warms up, and comes again
        "--max-concurrency", str(load.concurrency),
        "--request-rate", "inf",
        "--seed", str(load.seed),
        "--disable-tqdm",
        "--output-details",
        "--output-file", str(result),
    )  # fmt: skip


def serving_rows(load: ServeLoad, text: str) -> tuple[list[Row], list[Failure]]:
    """Return the rows of the last line of a result file; times without its first request.

    That one was a warm-up before, and has its prompt in the prefix cache. Its time is in that of
    all, so that its tokens are too, as that row's note says. A request that has fewer tokens than
    asked for is a failure: SGLang ends a stream with an error event, and bench_serving takes no
    notice of it.

    TPOT of a request is (latency - TTFT) / (output tokens - 1), so that stalls count. ITL is of all
    gaps between tokens, of all requests: its median is that of steps beside which no prompt is
    prefilled. Where each answer came in one event there is TTFT alone. Raises `BenchError` if no
    request was completed, or the file is not that of 0.5.17, or is cut.
    """
    duration, answers = _read_answers(text, load.output_tokens)
    good = [each for each in answers[1:] if not each.reason]
    if not good:
        reason = next((each.reason for each in answers if each.reason), "no output tokens")
        raise BenchError(f"no request was completed: {_short(reason)}")
    # Where each answer came at once, 0 would be nobody's time per token.
    timed = good if any(each.gaps_ms for each in good) else []
    series = {
        "ttft": [each.first_ms for each in good],
        "tpot": [sum(each.gaps_ms) / (each.tokens - 1) for each in timed],
        "itl": [gap for each in timed for gap in each.gaps_ms],
        "longest_gap": [max(each.gaps_ms) for each in timed if each.gaps_ms],
    }
    label, note = load.label, f"seed {load.seed}"
    rows = [
        Row.of(f"{name}_ms_{label}", Spread.of(values), "ms", note=note)
        for name, values in series.items()
        if values
    ]
    counted = [each for each in answers if not each.reason]
    throughput = sum(each.tokens for each in counted) / duration
    note += "" if answers[0].reason else ", with the first request, which was a warm-up before"
    rows.append(Row(f"output_tokens_per_s_{label}", throughput, "tok/s", n=len(counted), note=note))
    failures = [
        Failure(f"request_{index}_{label}", _short(each.reason))
        for index, each in enumerate(answers)
        if each.reason
    ]
    return rows, failures


class _Answer(NamedTuple):
    """What came for one request; `reason` says why it does not count, and is empty if it does."""

    first_ms: float
    gaps_ms: list[float]
    tokens: int
    reason: str


def _read_answers(text: str, output_tokens: int) -> tuple[float, list[_Answer]]:
    """Return the seconds of all requests together, and each, of the last line of a result file."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise BenchError("bench_serving wrote no result: its log says why")
    try:
        result: Mapping[str, Any] = json.loads(lines[-1])
    except ValueError as error:
        raise BenchError(
            f"the last line of bench_serving's result is not JSON ({error}): it was ended while it "
            "wrote, or the disk is full; its log says why"
        ) from error
    try:
        errors = [str(item) for item in result["errors"]]
        gaps = [[1e3 * gap for gap in item] for item in result["itls"]]
        first = [1e3 * float(item) for item in result["ttfts"]]
        lengths = [int(item) for item in result["output_lens"]]
        duration = float(result["duration"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"bench_serving's result lacks {error}: it is not that of SGLang 0.5.17"
        ) from error
    counts = [len(each) for each in (errors, first, gaps, lengths)]
    if len(set(counts)) > 1:
        raise BenchError(
            f"bench_serving's result has {', '.join(map(str, counts))} errors, ttfts, itls and "
            "output_lens, not one each for each request: it is not that of SGLang 0.5.17"
        )
    answers = []
    for told, first_ms, gaps_ms, tokens in zip(errors, first, gaps, lengths, strict=True):
        is_whole = tokens == output_tokens and first_ms > 0
        reason = told or ("" if is_whole else f"ended early, {tokens} tokens")
        answers.append(_Answer(first_ms, gaps_ms, tokens, reason))
    return duration, answers


def _short(reason: str) -> str:
    return " ".join(reason.split())[:300]
