# SPDX-License-Identifier: Apache-2.0
"""Time of predicting a layer's query on a GPU, with other tiles of the product with W_q.

    python tests/bench/kernels_query.py --tiles 64,128,4,4,256,96 64,256,4,3,256,none

A CUDA graph holds `predict_query` of several layers, each with weights of its own, more than the
L2 cache holds; figures are per layer, both launches. Tiles are `Tiles` of the kernel's module:
rows, columns, warps, stages, programs in all, registers. Each is compared with float64 first.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from kernels_score import replay_times

from tandemkv.kernels.query import predict_query
from tandemkv.kernels.streams import let_chain
from tandemkv.kernels.triton_ops import query as triton_query

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from query_inputs import QueryInputs, predict_in_float64, query_inputs, with_int8

HIDDEN, HEADS, DIM = 4096, 32, 128  # Qwen3-8B
TOLERANCE = {"int8": 5e-2, "native": 3e-2}


def check(given: QueryInputs, kind: str) -> None:
    want = predict_in_float64(*given)
    error = (predict_query(*given).double() - want).abs().max() / want.abs().max()
    if not float(error) < TOLERANCE[kind]:
        raise SystemExit(f"queries differ from float64 by {float(error):.3g}; not timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="int8", choices=("int8", "native"))
    for name, default in (("tokens", 8), ("layers", 12), ("replays", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chained", action="store_true")
    parser.add_argument(
        "--tiles", nargs="*", default=[], metavar="ROWS,COLUMNS,WARPS,STAGES,N,REGS"
    )
    args = parser.parse_args()
    if args.chained:
        let_chain(torch.device("cuda"))
    layers = []
    for _ in range(args.layers):
        given = query_inputs(
            (args.tokens, HIDDEN, HEADS, DIM), torch.bfloat16, "cuda", has_bias=False, has_norm=True
        )
        layers.append(with_int8(given) if args.kind == "int8" else given)
    name = "int8 alone" if args.chained and args.kind == "int8" else args.kind
    first = triton_query.TILES[name]
    parsed = [[None if x == "none" else int(x) for x in item.split(",")] for item in args.tiles]
    for tiles in [first, *(triton_query.Tiles(*item) for item in parsed), first]:
        triton_query.TILES[name] = tiles
        check(layers[0], args.kind)
        times = replay_times(
            lambda: [predict_query(*given) for given in layers], args.replays, args.layers
        )
        print(f"{tuple(tiles)}: {statistics.median(times):.2f} us a layer", flush=True)


if __name__ == "__main__":
    main()
