# SPDX-License-Identifier: Apache-2.0
"""Prefixes on another GPU: how fast they are copied, and what prefill attention takes with them.

    python tests/bench/far_prefix.py --out far_prefix.json

K/V lie on the second GPU as link ``shared`` has them, in pages of 128 tokens in any order. Two
GPUs with peer access; ``--far cuda:0`` tries the script on one.

``restore_gb_per_s_<layers>x64k`` is of `gather_tokens`, ``memcpy_gb_per_s`` of keys in one
piece, for comparison. ``attention_ms_<how>_<prefix>k`` is FlashInfer's attention of a chunk to its
prefix, a layer: over a pool on the other GPU (``far``), on the model's (``near``), and copied ahead
by `PrefixStaging` (``ahead``, the first copy included). Nothing else of a layer is computed, so
less hides a copy than in a model. Outputs of all three must be equal to the bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.inference_rank.attention.prefix_staging import PrefixStaging
from tandemkv.inference_rank.counters import Counters
from tandemkv.kernels.gather import gather_tokens
from tandemkv.kernels.triton_ops import gather
from tandemkv.server.evaluation.bench.report import Row, Spread, make_report, write_report
from tandemkv.server.evaluation.provenance import visible_gpu

NEAR = torch.device("cuda", 0)
QO_HEADS, HEADS, DIM, PAGE = 32, 8, 128, 128
REPEATS, ATTENDED_LAYERS = 7, 4


def milliseconds(run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Spread:
    """Time `run` on the current stream, after two that do not count."""
    samples = []
    for _ in range(REPEATS + 2):
        prepare()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        torch.cuda.synchronize(NEAR)
        samples.append(before.elapsed_time(after))
    return Spread.of(samples[2:])


def rate(spread: Spread, nbytes: int) -> Spread:
    """GB/s of `nbytes` that take a spread of ms."""
    median, slow, fast = (nbytes / ms / 1e6 for ms in (spread.median, spread.p90, spread.p10))
    return Spread(median=median, p10=slow, p90=fast, n=spread.n)


def slots_of(num_tokens: int, num_slots: int) -> torch.Tensor:
    """Slots ``[num_tokens]`` int32 of a prefix in pages that lie anywhere in the pool."""
    pages = torch.randperm(num_slots // PAGE, device=NEAR)[: -(-num_tokens // PAGE)]
    slots = pages[:, None] * PAGE + torch.arange(PAGE, device=NEAR)
    return slots.flatten()[:num_tokens].int()


def restores(kv: torch.Tensor, num_tokens: int) -> list[Row]:
    """Copy a prefix of one layer and of all layers, and a layer in one piece."""
    slots, layers = slots_of(num_tokens, kv.shape[2]), len(kv)
    out = torch.empty(2, 2, num_tokens, HEADS, DIM, dtype=kv.dtype, device=NEAR)
    gather_tokens(*kv[0], slots, *out[0])
    if not torch.equal(out[0], kv[0][:, slots.long()]):
        raise SystemExit("what was copied is not what was there; not timed")

    def copy(count: int) -> None:
        for layer in range(count):
            gather_tokens(*kv[layer], slots, *out[layer % 2])

    rows, name = [], f"{num_tokens >> 10}k"
    for count in (1, layers):
        spread = rate(milliseconds(partial(copy, count)), count * out[0].nbytes)
        rows.append(Row.of(f"restore_gb_per_s_{count}x{name}", spread, "GB/s"))
    keys, whole = out[0, 0], kv[0, 0, :num_tokens]
    spread = rate(milliseconds(lambda: keys.copy_(whole)), keys.nbytes)
    return [*rows, Row.of(f"memcpy_gb_per_s_1x{name}", spread, "GB/s")]


class Chunk:
    """FlashInfer's attention of a chunk to its prefix, in some layers."""

    def __init__(self, far: torch.Tensor, near: torch.Tensor, prefix: int, chunk: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._pools = {"far": far, "near": near}
        self._slots, self._prefix = slots_of(prefix, far.shape[2]), prefix
        self._q = torch.randn(chunk, QO_HEADS, DIM, device=NEAR).bfloat16()
        room = torch.empty(512 << 20, dtype=torch.uint8, device=NEAR)
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend="fa2")
        bounds = [torch.tensor([0, n], dtype=torch.int32, device=NEAR) for n in (chunk, prefix)]
        self.wrapper.begin_forward(
            *bounds, torch.cat([self._slots, self._slots.new_zeros(256)]),
            torch.ones(1, dtype=torch.int32, device=NEAR), QO_HEADS, HEADS, DIM, 1,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, non_blocking=True,
        )  # fmt: skip
        plan = SimpleNamespace(use_ragged=True, prefill_wrappers=[self.wrapper])
        pool = SimpleNamespace(dtype=far.dtype, k_buffer=list(far[:, 0]), v_buffer=list(far[:, 1]))
        full = SimpleNamespace(forward_metadata=plan)
        self._staging = PrefixStaging(full, pool, prefix, NEAR, Counters())

    def reset(self) -> None:
        """Name the slots of the pool again."""
        self.wrapper._paged_kv_indices_buf[: self._prefix].copy_(self._slots)

    def attend(self, how: str) -> list[torch.Tensor]:
        """Return the layers' outputs, with the prefix ``far``, ``near`` or copied ``ahead``."""
        outputs: list[torch.Tensor] = []
        if how == "ahead":
            self._staging.begin([self._prefix])
        for layer in range(ATTENDED_LAYERS):
            if how == "ahead":
                kv: Any = self._staging.get_kv_buffer(layer)
            else:
                kv = tuple(self._pools[how][layer])
            out, _ = self.wrapper.forward_return_lse(
                self._q, kv, causal=False, sm_scale=DIM**-0.5, logits_soft_cap=0.0
            )
            outputs.append(out)
            if how == "ahead":
                self._staging.attended(layer)
        return outputs


def attentions(kv: torch.Tensor, prefixes: list[int], chunk: int) -> list[Row]:
    """Time a layer's attention of a chunk to prefixes of several lengths."""
    far, rows = kv[:ATTENDED_LAYERS], []
    near = far.clone()
    for prefix in prefixes:
        timed, outputs = Chunk(far, near, prefix, chunk), {}
        for how in ("near", "far", "ahead"):
            timed.reset()
            outputs[how] = timed.attend(how)
        for how, found in outputs.items():
            if not all(map(torch.equal, found, outputs["near"])):
                raise SystemExit(f"{how}: outputs differ from those of a pool nearby; not timed")
        for how in outputs:
            spread = milliseconds(partial(timed.attend, how), timed.reset)
            layer = [x / ATTENDED_LAYERS for x in (spread.median, spread.p10, spread.p90)]
            each = Spread(median=layer[0], p10=layer[1], p90=layer[2], n=spread.n)
            rows.append(Row.of(f"attention_ms_{how}_{prefix >> 10}k", each, "ms"))
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--far", default="cuda:1", help="the GPU that has the K/V")
    parser.add_argument("--layers", type=int, default=36, help="of a whole restore")
    parser.add_argument("--restored", type=int, default=64, help="tokens of a prefix, in 1024")
    parser.add_argument("--prefixes", default="8,16,32,56", help="of attention, likewise")
    parser.add_argument("--chunk", type=int, default=8192, help="queries of attention")
    parser.add_argument("--programs", type=int, help="of a copy, in place of the default")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.programs:
        gather._MOST_PROGRAMS = args.programs
    num_tokens = args.restored << 10
    homes = Homes(inference=NEAR, engine=torch.device(args.far), here=NEAR)
    shape = (max(args.layers, ATTENDED_LAYERS), 2, num_tokens + 64 * PAGE, HEADS, DIM)
    kv = MappedTensors(homes).allocate("kv", shape, torch.bfloat16)
    for layer in kv:
        layer.normal_()
    rows = restores(kv[: args.layers], num_tokens)
    rows += attentions(kv, [int(x) << 10 for x in args.prefixes.split(",")], args.chunk)
    report = make_report("far_prefix", rows, command=["python", *sys.argv], gpu=visible_gpu())
    write_report(report, args.out)
    for row in rows:
        print(f"{row.figure:32} {row.value:9.2f} {row.unit}")


if __name__ == "__main__":
    main()
