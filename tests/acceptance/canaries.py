# SPDX-License-Identifier: Apache-2.0
"""Requests that each hold words of their own, and answers that may hold no others.

``TANDEMKV_CANARIES`` is their number (10000), ``TANDEMKV_CANARIES_S`` the longest time for them.
"""

from __future__ import annotations

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import life_cycle
from rank_servers import Server, ours

COMPLETIONS = "/v1/completions"
CALLERS = 32
HANG_UP_SHARE = 0.2
_TEXT = """
apple river stone window garden copper silver winter summer yellow orange purple bridge castle
forest island mirror needle pepper pocket rabbit saddle shadow spider square sugar table tiger
tower train valley violin wagon water wheel wolf wood zebra anchor arrow basket bottle bread
button candle carpet chain circle cloud coffee corner cotton crystal desert diamond doctor dragon
eagle engine fabric father feather finger flower friend ghost glass gold grass hammer harbor heart
honey horse house iron jacket jungle kitchen ladder lake leather lemon letter lion market meadow
metal milk monkey moon mother mountain mouse music night ocean oil paper pencil pillow planet
plate pony potato prison queen rain ribbon rice ring road rock roof rose salt sand school seed
sheep ship silk sister skin sky snow soap soldier soup spoon spring star steel storm street sword
teacher temple thunder tree turtle umbrella uncle village wall whale wind wing
"""
WORDS = _TEXT.split()
"""Of a token each."""
CANARY_SELECTION = {
    "policy": "look_ahead",
    "budget_tokens": 32,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 8,
}
"""Most prompts are longer than what is resident: answers come from sets that are recycled."""


def run() -> dict[str, Any]:
    """Canaries on a server that recycles slots: it holds some dozens of them at once."""
    settings = {
        "selection": CANARY_SELECTION,
        "transport": "shared",
        "cache": {"capacity_tokens": 6144},
        "max_context": 512,
        "max_running_requests": CALLERS,
    }
    with ours(settings) as server:
        number = int(os.environ.get("TANDEMKV_CANARIES", "10000"))
        longest_s = float(os.environ.get("TANDEMKV_CANARIES_S", "86400"))
        found = send_all(server, number, longest_s)
        inference, cache = server.values()
        found |= {"counters": {"inference_rank": inference, "cache_rank": cache}}
        return found | {"ready": server.get("/tandemkv/ready")[0]}


def is_all_sent(found: dict[str, Any]) -> bool:
    """Whether the canaries were sent that were asked for."""
    return bool(found["sent"] == found["asked_for"])


def send_all(server: Server, number: int, longest_s: float) -> dict[str, Any]:
    """Send requests that each hold a word of their own; look for it in every other answer.

    One in five hangs up in mid-stream, so that its rows and slots are another's at once.
    """
    end = time.monotonic() + longest_s
    start = time.monotonic()

    def one(index: int) -> tuple[int, str, str] | None:
        if time.monotonic() > end:
            return None
        rng = random.Random(index)
        word = canary(index)
        filler = "The quick brown fox jumps over the lazy dog. " * rng.randrange(8)
        prompt = f"{filler}{word}; {word};"
        body = {"prompt": prompt, "max_tokens": rng.randrange(4, 7), "temperature": 0}
        if rng.random() < HANG_UP_SHARE:
            lines = rng.randrange(6)
            life_cycle.read_some(server, body, lines=lines, path=COMPLETIONS)
            return index, "hung up", ""
        code, found = server.post(COMPLETIONS, body, 300.0)
        return index, str(code), found["choices"][0]["text"] if code == 200 else str(found)[:200]

    with ThreadPoolExecutor(CALLERS) as pool:
        rows = [row for row in pool.map(one, range(number)) if row is not None]
    good = [(index, text) for index, outcome, text in rows if outcome == "200"]
    hung_up = sum(outcome == "hung up" for _, outcome, _ in rows)
    given_out = {canary(index) for index, _, _ in rows}
    foreign = [index for index, text in good if has_foreign(text, index, given_out)]
    return {
        "asked_for": number,
        "sent": len(rows),
        "at_once": CALLERS,
        "seconds": round(time.monotonic() - start, 1),
        "hung_up_in_mid_stream": hung_up,
        "answers_with_their_own": sum(canary(index) in text for index, text in good),
        "foreign": len(foreign),
        "failed": len(rows) - len(good) - hung_up,
    }


def canary(index: int) -> str:
    """Return three words of one request, which a small model repeats without a mistake."""
    place = index * 48_271 % len(WORDS) ** 3
    return " ".join(WORDS[place // len(WORDS) ** power % len(WORDS)] for power in range(3))


def has_foreign(text: str, index: int, given_out: set[str]) -> bool:
    """Whether three words of another request stand together in the answer to `index`."""
    words, own = re.findall(r"[a-z]+", text), set(canary(index).split())
    triples = (words[at : at + 3] for at in range(len(words) - 2))
    return any(" ".join(each) in given_out and not own.issuperset(each) for each in triples)
