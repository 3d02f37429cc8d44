# SPDX-License-Identifier: Apache-2.0
"""Decode steps of variants of the code in one process, on a GPU: `tandemkv bench decode` in turns.

    python tests/bench/decode_variants.py --variant "" \
        --variant "kernels.triton_ops.query.TILES.int8=(64,128,4,4,256,96)" --out variants.jsonl \
        -- --config in-process-tp1 --points 8x64k,8x96k --tokenizer MODEL --work-dir DIR

A start takes one to two minutes, a capture anew ten seconds: so each variant sets attributes,
captures SGLang's decode graphs again and is timed, all with the same model and pools, twice in
turns. A variant is a list of ``path=value`` with ``;`` between; a path leads from a module of
tandemkv, or from ``backend`` (SGLang's attention backend) or ``rank`` (its cache rank), over
attributes and keys; a value is a Python literal, of which a named tuple takes the items. What
follows ``--`` goes to `tandemkv bench decode`, whose own report holds the last variant. Values
that a Triton kernel reads as a global are compiled in when it is first launched: not to be varied.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_VARIANTS, _OUT = "TANDEMKV_DECODE_VARIANTS", "TANDEMKV_DECODE_VARIANTS_OUT"
_ROUNDS = 2


def main() -> None:
    """Start `bench decode`, which runs this module in the place of `decode_bench`."""
    from tandemkv.server.cli.commands import app
    from tandemkv.server.evaluation.bench import decode_steps

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", action="append", required=True, metavar="PATH=VALUE;...")
    parser.add_argument("--out", type=Path, required=True, help="a JSON line for each figure")
    parser.add_argument("arguments", nargs="*", help="of tandemkv bench decode, after --")
    args = parser.parse_args()
    for variant in args.variant:
        for path, _ in parse(variant):
            if path[0] not in ("backend", "rank"):
                follow(path, {})  # a mistake in it is found before the model is loaded
    os.environ.update({_VARIANTS: json.dumps(args.variant), _OUT: str(args.out.resolve())})
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (here, os.environ.get("PYTHONPATH", "")))
    )
    decode_steps.MODULE = Path(__file__).stem
    app(["bench", "decode", *args.arguments], prog_name="tandemkv")


def parse(variant: str) -> list[tuple[list[str], Any]]:
    """Return paths and values of a variant."""
    pairs = (item.partition("=") for item in variant.split(";") if item.strip())
    found = []
    for path, equals, value in pairs:
        if not equals:
            raise SystemExit(f"variant {variant!r}: {path!r} has no value; write path=value")
        found.append((path.strip().split("."), ast.literal_eval(value.strip())))
    return found


def follow(path: list[str], roots: Mapping[str, Any]) -> tuple[Any, str]:
    """Return what holds the last part of a path, and that part."""
    rest, name, at = list(path), "tandemkv", roots.get(path[0])
    if at is not None:
        rest.pop(0)
    while rest and (at is None or isinstance(at, ModuleType)):
        name = f"{name}.{rest[0]}"
        if not _is_module(name):
            break
        at = importlib.import_module(name)
        rest.pop(0)
    for part in rest[:-1]:
        at = at.get(part) if isinstance(at, Mapping) else getattr(at, part, None)
    if not rest or at is None or not _has(at, rest[-1]):
        raise SystemExit(f"{'.'.join(path)}: there is no such attribute; see --help")
    return at, rest[-1]


def assign(path: list[str], value: Any, roots: Mapping[str, Any]) -> Any:
    """Set what is at a path; returns what was there."""
    at, last = follow(path, roots)
    before = at[last] if isinstance(at, dict) else getattr(at, last)
    if hasattr(before, "_make") and not hasattr(value, "_make"):
        value = type(before)._make(value)
    if isinstance(at, dict):
        at[last] = value
    else:
        setattr(at, last, value)
    return before


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _has(at: Any, part: str) -> bool:
    return part in at if isinstance(at, Mapping) else hasattr(at, part)


def run_rank(
    args: argparse.Namespace, points: list[tuple[int, int]], server_args: Any, port_args: Any,
    tp_rank: int,
) -> None:  # fmt: skip
    """Load once; measure every point of every variant, in turns."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins

    from tandemkv.inference_rank import decode_bench

    if args.extra_streams:
        raise SystemExit(f"extra_streams={args.extra_streams}: not varied here; leave it out")
    load_plugins()
    decode_bench.fill_dummies()
    bench, _ = one_batch.load_model(server_args, port_args, tp_rank, tp_rank)
    runner = bench.torch_runner
    decode_bench.require_filled(runner.model)
    decode_bench.fill_pool(runner)
    roots = {"backend": runner.attn_backend}
    if hasattr(runner.attn_backend, "cache_rank"):
        roots["rank"] = runner.attn_backend.cache_rank
    variants = [parse(variant) for variant in json.loads(os.environ[_VARIANTS])]
    found: list[dict[str, Any]] = []
    kept = []  # graphs: their memory pool goes with the last one, and SGLang names it again
    for _ in range(_ROUNDS):
        for variant in variants:
            before = [(path, assign(path, value, roots)) for path, value in variant]
            kept.append(runner.decode_cuda_graph_runner)
            runner.init_decode_cuda_graph()
            found = [decode_bench.measure(runner, *point, args.steps) for point in points]
            if args.trace is not None:
                folder = args.trace / "_".join(f"{path[-1]}={value}" for path, value in variant)
                for point in points:
                    decode_bench.write_trace(runner, *point, folder, tp_rank)
            for path, value in reversed(before):
                assign(path, value, roots)
            if tp_rank == 0:
                with Path(os.environ[_OUT]).open("a") as file:
                    for point in found:
                        row = {"variant": {".".join(p): v for p, v in variant}, **point}
                        file.write(json.dumps(row) + "\n")
    if tp_rank == 0:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if _VARIANTS in os.environ:
        from tandemkv.inference_rank import decode_bench as _decode_bench

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        _decode_bench.run_rank = run_rank
        _decode_bench.main()
    else:
        main()
