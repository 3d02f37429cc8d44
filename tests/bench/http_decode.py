# SPDX-License-Identifier: Apache-2.0
"""Time per token, and to the first, of one request at a time, over HTTP, of servers in turns.

    python tests/bench/http_decode.py stock=http://127.0.0.1:31000 ours=http://127.0.0.1:31001 \
        --contexts 2048,8192 --out batch1_http.json

They may share a GPU, where an idle server takes none of it: figures of two GPUs of one machine
differ by 2 %. A figure is what 416 tokens take longer than 32, after prompts of one length that no
cache has seen: prefill and HTTP are not in it. The first token is the whole of a request for one:
prefill, HTTP and all. ``p10`` and ``p90`` hold the least and the largest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

SHORT, LONG = 32, 416
_SEEDS = itertools.count()


def seconds(url: str, num_prompt: int, num_new: int) -> float:
    """How long a request of random tokens takes."""
    rng = random.Random(next(_SEEDS))
    body = {
        "input_ids": [rng.randrange(1000, 40000) for _ in range(num_prompt)],
        "sampling_params": {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: dict[str, Any] = json.load(reply)
    end = time.perf_counter()
    if found["meta_info"]["completion_tokens"] != num_new:
        raise SystemExit(f"{url} gave {found['meta_info']['completion_tokens']} tokens")
    return end - begin


def rows_of(figure: str, found: dict[str, list[float]], context: int) -> list[dict[str, Any]]:
    """Return a row a server."""
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        spread = {"p10": min(values), "p90": max(values), "n": len(values)}
        value = statistics.median(values)
        rows.append(
            {"figure": f"{figure}_{name}_1x{context}", "value": value, "unit": "ms", **spread}
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--contexts", default="2048,8192", help="tokens of the prompts")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    servers = dict(server.split("=", 1) for server in args.servers)
    if len(servers) < len(args.servers):
        parser.error("two servers of one name; give each a name of its own")
    rows: list[dict[str, Any]] = []
    for context in map(int, args.contexts.split(",")):
        for url in servers.values():
            seconds(url, context, LONG)  # compiles what is new
        first: dict[str, list[float]] = {name: [] for name in servers}
        later: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(args.turns):
            for name, url in servers.items():
                first[name].append(1e3 * seconds(url, context, 1))
                extra = seconds(url, context, LONG) - seconds(url, context, SHORT)
                later[name].append(1e3 * extra / (LONG - SHORT))
        added = rows_of("http_first_token_ms", first, context)
        added += rows_of("http_ms_per_token", later, context)
        rows += added
        print(*map(json.dumps, added), sep="\n", flush=True)
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
