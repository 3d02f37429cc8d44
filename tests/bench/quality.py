# SPDX-License-Identifier: Apache-2.0
"""Quality of a running server on real texts: forced perplexity and needle retrieval.

    python tests/bench/quality.py perplexity --url http://127.0.0.1:30000 --tokenizer DIR --out FILE
    python tests/bench/quality.py needle --url ... --tokenizer DIR --out FILE

Perplexity forces the continuation token by token *through decode* (needs a server with
``evaluation: true``); prompt logprobs would be prefill's, which is dense. The needle samples are
raw completions, because a 135M model follows no instructions at these lengths.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PREFIX_TOKENS = 6500
FORCED_TOKENS = 320
NUM_NEEDLES = 20
CITIES = (
    *("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Dublin", "Havana", "Nairobi", "Warsaw", "Lisbon"),
    *("Athens", "Manila", "Seoul", "Tunis", "Vienna", "Zurich", "Hanoi", "Accra", "Riga", "Doha"),
)


def language_reference() -> str:
    """The first of `texts`, which every Python has: some come without idlelib."""
    if os.environ.get("TANDEMKV_CORPUS"):
        return texts()["language reference"]
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(t for _, t in sorted(topics.items()) if len(t) > 4000)


def texts() -> dict[str, str]:
    """Four real texts of Python and scikit-learn: prose, code, change log, data notes.

    ``TANDEMKV_CORPUS`` names a JSON file of texts to use instead, where sources are missing.
    """
    if os.environ.get("TANDEMKV_CORPUS"):
        found: dict[str, str] = json.loads(Path(os.environ["TANDEMKV_CORPUS"]).read_text())
        return found
    idle = importlib.util.find_spec("idlelib")
    sklearn = importlib.util.find_spec("sklearn")
    code = importlib.util.find_spec("argparse")
    if idle is None or idle.origin is None or code is None or code.origin is None:
        raise SystemExit("this Python lacks idlelib or argparse sources")
    if sklearn is None or sklearn.origin is None:
        raise SystemExit("scikit-learn is needed for its data set descriptions: make setup")
    notes = sorted((Path(sklearn.origin).parent / "datasets" / "descr").glob("*.rst"))
    return {
        "language reference": language_reference(),
        "argparse source": Path(code.origin).read_text(encoding="utf-8"),
        "change log": (Path(idle.origin).parent / "NEWS.txt").read_text(encoding="utf-8"),
        "data set notes": "\n\n".join(p.read_text(encoding="utf-8") for p in notes),
    }


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request to SGLang's native endpoint."""
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def perplexity(
    url: str, tokenizer: Any, corpus: dict[str, str], num_prefix: int, num_forced: int
) -> list[dict[str, Any]]:
    """NLL of each forced token of each text, all texts at once."""

    def run(item: tuple[str, str]) -> dict[str, Any]:
        name, text = item
        ids = tokenizer(text)["input_ids"][: num_prefix + num_forced]
        if len(ids) < num_prefix + num_forced:
            raise SystemExit(f"text {name!r} has only {len(ids)} tokens")
        forced = ids[num_prefix:]
        body = {
            "input_ids": ids[:num_prefix],
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": len(forced),
                "temperature": 0,
                "ignore_eos": True,
                "custom_params": {"forced_token_ids": forced},
            },
        }
        got = post(url, body)["meta_info"]["output_token_logprobs"]
        if [token for _, token, _ in got] != forced:
            raise SystemExit("the server did not force the tokens: start it with evaluation: true")
        # The first token comes from prefill, which is dense: it proves nothing.
        return {"text": name, "nll": [-logprob for logprob, _, _ in got[1:]]}

    with ThreadPoolExecutor(len(corpus)) as pool:
        return list(pool.map(run, corpus.items()))


def needle_prompts(tokenizer: Any, corpus: dict[str, str]) -> list[dict[str, Any]]:
    """Seeded samples of 3-6K tokens: a fact at a random depth, then its beginning once more."""
    rng = random.Random(20)
    haystack = corpus["language reference"].split("\n")
    samples = []
    for i in range(NUM_NEEDLES):
        city, number = CITIES[i], str(rng.randint(1000, 9999))
        length, depth = rng.randint(3000, 6000), rng.uniform(0.1, 0.8)
        start = rng.randrange(len(haystack) // 3)
        ids = tokenizer("\n".join(haystack[start:]))["input_ids"][:length]
        cut = int(depth * len(ids))
        fact = f"\n\nThe special magic number for {city} is {number}. Remember it.\n\n"
        text = tokenizer.decode(ids[:cut]) + fact + tokenizer.decode(ids[cut:])
        samples.append(
            {
                "prompt": f"{text}\n\nThe special magic number for {city} is",
                "answer": number,
                "depth": round(depth, 3),
                "tokens": length,
            }
        )
    return samples


def needle(url: str, tokenizer: Any, corpus: dict[str, str]) -> list[dict[str, Any]]:
    """Answers of all samples, four at a time."""

    def run(sample: dict[str, Any]) -> dict[str, Any]:
        params = {"max_new_tokens": 8, "temperature": 0}
        text = post(url, {"text": sample["prompt"], "sampling_params": params})["text"]
        kept = {key: sample[key] for key in ("answer", "depth", "tokens")}
        return kept | {"got": text, "is_right": sample["answer"] in text}

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(run, needle_prompts(tokenizer, corpus)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=("perplexity", "needle"))
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--tokenizer", required=True, help="model directory")
    parser.add_argument("--label", default="", help="name of the row")
    parser.add_argument("--corpus", type=Path, help="JSON of texts instead of the built-in ones")
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS, help="prompt tokens")
    parser.add_argument("--forced", type=int, default=FORCED_TOKENS, help="forced tokens")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    corpus = json.loads(args.corpus.read_text()) if args.corpus else texts()
    start = time.time()
    if args.task == "needle":
        rows = needle(args.url, tokenizer, corpus)
    else:
        rows = perplexity(args.url, tokenizer, corpus, args.prefix, args.forced)
    with urllib.request.urlopen(f"{args.url}/tandemkv/status", timeout=10) as reply:
        status = json.load(reply)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"task": args.task, "label": args.label, "rows": rows, "status": status}
    args.out.write_text(json.dumps(result | {"seconds": round(time.time() - start, 1)}))
    print(args.label, args.task, f"{time.time() - start:.0f} s")
    if args.task == "needle":
        print(sum(r["is_right"] for r in rows), "of", len(rows), "right")


if __name__ == "__main__":
    main()
