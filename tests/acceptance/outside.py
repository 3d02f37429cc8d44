# SPDX-License-Identifier: Apache-2.0
"""Item *outside*: judges that others wrote, openai-python and sglang.bench_serving."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI
from rank_servers import Server, environment, model_dir, ours
from workbench import SMALL, Bench, Checks

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BENCH_PROMPTS = 12


def run(_bench: Bench) -> dict[str, Any]:
    """Both judges against one server."""
    checks = Checks()
    with ours({"selection": SMALL}) as server:
        for name, check in OPENAI_CHECKS.items():
            try:
                found = check(*connect(server))
            except Exception as error:  # a judge's complaint is the figure
                found = f"{type(error).__name__}: {error}"
            checks.add(f"openai-python: {name}", found, "true", found is True)
        figures, stderr = bench_serving(server)
    completed = figures.get("completed")
    checks.add("bench_serving: completed", completed, "12", completed == BENCH_PROMPTS)
    kept = ("completed", "output_throughput", "median_ttft_ms", "median_tpot_ms")
    return checks.result(bench_serving={k: figures.get(k) for k in kept}, stderr=stderr)


def connect(server: Server) -> tuple[OpenAI, str]:
    """Client of a server and the name of its model."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return client, client.models.list().data[0].id


def chat(client: Any, model: str) -> bool:
    """One answer with usage."""
    done = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, temperature=0
    )
    return "Paris" in done.choices[0].message.content and done.usage.completion_tokens > 3


def chat_stream(client: Any, model: str) -> bool:
    """The stream's text is that of the single answer, and says how it ended."""
    arguments = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**arguments).choices[0]
    chunks = [c for c in client.chat.completions.create(**arguments, stream=True) if c.choices]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    return text == whole.message.content and bool(chunks[-1].choices[0].finish_reason)


def chat_logprobs(client: Any, model: str) -> bool:
    """Every token with its logprob and two alternatives."""
    done = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    rows = done.choices[0].logprobs.content
    return len(rows) >= 5 and all(r.logprob <= 0 and len(r.top_logprobs) == 2 for r in rows)


def completion(client: Any, model: str) -> bool:
    """Plain completion with logprobs."""
    done = client.completions.create(
        model=model, prompt="One, two, three,", max_tokens=8, temperature=0, logprobs=1
    )
    choice = done.choices[0]
    return "four" in choice.text and len(choice.logprobs.tokens) == len(
        choice.logprobs.token_logprobs
    )


def completion_stream(client: Any, model: str) -> bool:
    """The stream's text is that of the single answer."""
    arguments = {"model": model, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**arguments).choices[0].text
    parts = client.completions.create(**arguments, stream=True)
    return "".join(p.choices[0].text for p in parts if p.choices) == whole


def stop(client: Any, model: str) -> bool:
    """Ends before the stop word."""
    done = client.completions.create(
        model=model, prompt="One, two, three,", max_tokens=32, temperature=0, stop=["five"]
    )
    choice = done.choices[0]
    return choice.finish_reason == "stop" and "five" not in choice.text and "four" in choice.text


def two_answers(client: Any, model: str) -> bool:
    """n = 2; at temperature 0 both are alike."""
    done = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, temperature=0, n=2
    )
    texts = [choice.message.content for choice in done.choices]
    return len(texts) == 2 and texts[0] == texts[1] and "Paris" in texts[0]


OPENAI_CHECKS: dict[str, Callable[[Any, str], bool]] = {
    "chat": chat,
    "chat, streaming": chat_stream,
    "chat, logprobs": chat_logprobs,
    "completions": completion,
    "completions, streaming": completion_stream,
    "stop": stop,
    "n = 2": two_answers,
}


def bench_serving(server: Server) -> tuple[dict[str, Any], str]:
    """Figures of SGLang's own client with random ids, and its errors if it failed."""
    out = Path(tempfile.mkdtemp()) / "bench.jsonl"
    argv = [
        *(sys.executable, "-P", "-W", "ignore", "-m", "sglang.bench_serving"),
        *("--backend", "sglang-oai", "--base-url", server.url, "--tokenizer", model_dir()),
        *("--dataset-name", "random-ids", "--num-prompts", str(BENCH_PROMPTS)),
        *("--random-input-len", "256", "--random-output-len", "16", "--max-concurrency", "4"),
        *("--output-file", str(out), "--model", connect(server)[1]),
    ]
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    lines = out.read_text().splitlines() if out.exists() else []
    if not lines:
        return {}, done.stderr[-2000:]
    return json.loads(lines[-1]), ""
