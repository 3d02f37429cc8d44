# SPDX-License-Identifier: Apache-2.0
"""A server's answers against those of stock SGLang: on a GPU with FlashInfer, in bfloat16.

Two runs of one model in bfloat16 agree to rounding: logits between 16 and 32 are multiples of 1/8.
So a token may differ where stock SGLang's two best lie within `MARGIN`; from there on the texts are
different ones and are compared no more. ``TANDEMKV_TEST_DEVICE=cpu`` does the same in float32 with
the backends for CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from exactness import make_prompts, run
from nothing_lost import wait_for
from rank_servers import Server, model_dir

from tandemkv.server.evaluation.quality.servers import stock_server, tandem_server
from tandemkv.server.settings.launch_settings import ServeSettings

DEVICE = os.environ.get("TANDEMKV_TEST_DEVICE", "cuda")
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"
MARGIN = 0.5 if DEVICE == "cuda" else 1e-3
MEAN_LOGPROB_DIFFERENCE = 0.05 if DEVICE == "cuda" else 1e-4
_LOG_LINES = 60
COUNT, LONGEST, NEW_TOKENS = (20, 3500, 64) if DEVICE == "cuda" else (5, 600, 16)
CAPACITY_TOKENS = 64 * 1024 if DEVICE == "cuda" else 16 * 1024
COVERING = {
    "budget_tokens": 4096 if DEVICE == "cuda" else 1024,
    "resident_factor": 1.0,
    "dense_while_fits": False,
}
"""Settings under which everything is selected from, and selected."""
_SGLANG_ARGS = (
    *("--mem-fraction-static", "0.5", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
)
_DENSE_ARGS = ("--attention-backend", "flashinfer", "--page-size", "1")


def settings_of(selection: dict[str, Any], **changes: Any) -> ServeSettings:
    """Settings of a server in one process; `changes` are made at the top level."""
    given = {
        "model": model_dir(),
        "device": DEVICE,
        "dtype": DTYPE,
        "cache_ranks": 0,
        "max_running_requests": 8,
        "cache": {"capacity_tokens": CAPACITY_TOKENS},
        "start_timeout_s": 600.0,
        "evaluation": True,
        "sglang_args": _SGLANG_ARGS if DEVICE == "cuda" else (),
        "selection": selection,
    }
    return ServeSettings.model_validate(given | changes)


@contextlib.contextmanager
def served(selection: dict[str, Any], **changes: Any) -> Iterator[Server]:
    """Ours, as `settings_of` says; tests may empty its cache also where it is not evaluated."""
    with tempfile.NamedTemporaryFile("w") as file:  # private
        key = secrets.token_hex(16)
        file.write(key)
        file.flush()
        edge = {"edge": {"admin_key_file": file.name}}
        with tandem_server(settings_of(selection, **edge, **changes), threading.Event()) as found:
            try:
                yield Server(found.url, os.getpid(), Path(os.devnull), admin_key=key)
            except BaseException:
                _print_logs(found.log_dir)  # they go with the server
                raise


def _print_logs(folder: Path | None) -> None:
    for log in sorted(folder.glob("*.log")) if folder is not None else ():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"last lines of {log.name}:", *lines[-_LOG_LINES:], sep="\n")


@contextlib.contextmanager
def stock(*more_args: str, model: Path | None = None) -> Iterator[Server]:
    """Stock SGLang, on a GPU with FlashInfer unless `more_args` name another backend."""
    with stock_server(
        settings_of({"policy": "exact"}),
        model_dir=Path(model_dir()) if model is None else model,
        device=DEVICE,
        dtype=DTYPE,
        stop=threading.Event(),
        more_args=(*_DENSE_ARGS, *more_args) if DEVICE == "cuda" else more_args,
    ) as found:
        yield Server(found.url, os.getpid(), Path(os.devnull))


def prompts_of(token_ids: list[int]) -> list[list[int]]:
    """`COUNT` prompts of up to `LONGEST` tokens."""
    return make_prompts(token_ids, count=COUNT, shortest=50, longest=LONGEST)


def killed_while(
    server: Server, prompts: list[list[int]], pid: int, *, new_tokens: int, at_once: int = 1
) -> list[dict[str, Any]]:
    """Answer `prompts`, the process `pid` being killed once they decode."""
    enough = server.values()[0]["decode_steps_total"] + new_tokens // 4
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run, server, prompts, new_tokens=new_tokens, at_once=at_once)
        wait_for(lambda: server.values()[0]["decode_steps_total"] >= enough, "nothing decodes")
        os.kill(pid, signal.SIGKILL)
        return found.result()


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """First differences, stock SGLang's margins there, and differences of logprobs before."""
    margins, gaps = {}, []
    for i, (mine, want) in enumerate(zip(ours, theirs, strict=True)):
        same = [a == b for a, b in zip(mine["ids"], want["ids"], strict=True)]
        end = same.index(False) if False in same else len(same)
        if end < len(same):
            margins[f"prompt {i}, token {end}"] = want["margins"][end]
        pairs = zip(mine["logprobs"][:end], want["logprobs"][:end], strict=True)
        gaps += [abs(a - b) for a, b in pairs]
    return {
        "tokens_compared": len(gaps),
        "margins_where_first_different": margins,
        "mean_logprob_difference": float(np.mean(gaps)),
        "largest_logprob_difference": float(np.max(gaps)),
        "cached_tokens": sum(answer["cached"] for answer in ours),
    }


def check(
    found: dict[str, Any], what: str, margin: float = MARGIN, tokens: int = COUNT * NEW_TOKENS // 3
) -> None:
    """Fail where other tokens or logprobs are more than rounding; print what was found.

    `tokens` must have been compared at least.
    """
    print(what, json.dumps(found))
    beyond = {k: m for k, m in found["margins_where_first_different"].items() if m > margin}
    assert not beyond, f"{what}: other tokens where stock SGLang was sure: {beyond}; {found}"
    assert found["mean_logprob_difference"] <= MEAN_LOGPROB_DIFFERENCE, f"{what}: {found}"
    assert found["tokens_compared"] >= tokens, f"{what}: {found}"
