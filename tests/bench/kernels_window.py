# SPDX-License-Identifier: Apache-2.0
"""Time of scoring a prompt under its last queries, once a layer when prefill ends, on a GPU.

    python tests/bench/kernels_window.py --first 128,128,2,8,128 --second 64,128,2,8,128

Each line has a call on the device (CUDA events), its launches on the host, and the same for the
former version, which wrote logits in chunks; medians. ``--first`` and ``--second`` try other
`Tuning` of the two passes (0 registers: no limit), for each kind of keys that is measured, and
``--programs`` and ``--splits`` other parts. Scores are compared with the reference first.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from kernels_score import DIM, HEADS, QO_HEADS

from tandemkv.kernels.dispatch import plain
from tandemkv.kernels.paging import key_rows, slots_of
from tandemkv.kernels.score import score_window
from tandemkv.kernels.triton_ops import score_window as window_ops

KINDS = {"bf16": "half", "int8": "int8", "int4": "int4"}
WINDOW, RECENT, SINK, SCALE = 64, 64, 4, DIM**-0.5


def former(
    q_window: torch.Tensor, k_pool: torch.Tensor, slots_row: torch.Tensor, lo: int, hi: int,
    q_positions: torch.Tensor, *, scale: float, k_scale: torch.Tensor | None, page_size: int,
) -> torch.Tensor:  # fmt: skip
    """Score as before: float32 products over chunks of tokens, twice."""
    scores = q_window.new_full((HEADS, hi), float("-inf"), dtype=torch.float32)
    group = QO_HEADS // HEADS
    grouped = (q_window.float() * scale).view(-1, HEADS, group, DIM)
    queries = grouped.transpose(0, 1).reshape(HEADS, -1, DIM)
    limits = q_positions[:, None].expand(-1, group).reshape(1, -1, 1)
    chunk = max(1, (1 << 24) // (len(q_window) * QO_HEADS))

    def logits_of(start: int, end: int) -> torch.Tensor:
        index = slots_of(slots_row, start, end, page_size).long()
        logits = torch.bmm(queries, key_rows(k_pool, index, k_scale).permute(1, 2, 0))
        positions = torch.arange(start, end, device=logits.device)
        return logits.masked_fill_(positions > limits, float("-inf"))

    bounds = [(start, min(start + chunk, hi)) for start in range(lo, hi, chunk)]
    lse = queries.new_full(queries.shape[:2], float("-inf"))
    for start, end in bounds:
        lse = torch.logaddexp(lse, torch.logsumexp(logits_of(start, end), dim=-1))
    lse.masked_fill_(lse == float("-inf"), float("inf"))
    for start, end in bounds:
        weights = torch.exp(logits_of(start, end) - lse[..., None])
        scores[:, start:end] = weights.sum(dim=1) / (len(q_window) * group)
    return scores


def make_call(index: str, length: int, page: int) -> tuple[tuple, dict]:
    """Arguments of a prompt of `length` tokens; random bits are as good as quantized keys."""
    cuda, num_pages = torch.device("cuda"), -(-length // page)
    num_slots = num_pages * page
    k_scale = None
    if index == "bf16":
        keys = torch.randn(num_slots, HEADS, DIM, device=cuda, dtype=torch.bfloat16)
    elif index == "int8":
        keys = torch.randint(-127, 128, (num_slots, HEADS, DIM), device=cuda, dtype=torch.int8)
        k_scale = torch.rand(num_slots, HEADS, device=cuda) * 0.02 + 0.01
    else:
        shape = (num_pages, HEADS, page, DIM // 2)
        keys = torch.randint(0, 256, shape, device=cuda, dtype=torch.uint8)
        k_scale = torch.rand(num_pages, HEADS, 2, DIM, device=cuda, dtype=torch.float16)
        k_scale[:, :, 0].mul_(0.2).add_(0.1)
        k_scale[:, :, 1].add_(-2.5)
    q_window = torch.randn(WINDOW, QO_HEADS, DIM, device=cuda, dtype=torch.bfloat16)
    table = torch.randperm(num_pages, device=cuda).int()
    positions = torch.arange(length - WINDOW, length, device=cuda)
    hi = length + 1 - RECENT
    arguments = (q_window, keys, table, SINK, hi, positions)
    return arguments, {"scale": SCALE, "k_scale": k_scale, "page_size": page}


def times(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median microseconds of a call on the device, and of its launches on the host."""
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    host = []
    for begin, end in zip(events[::2], events[1::2], strict=True):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # the launches are made meanwhile, as under a prefill
        begin.record()
        start = time.perf_counter()
        run()
        host.append(1e6 * (time.perf_counter() - start))
        end.record()
    torch.cuda.synchronize()
    device = [1e3 * a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)]
    return statistics.median(device), statistics.median(host)


def check(index: str, page: int) -> None:
    """Compare with the reference at two lengths, one within a tile."""
    for length in (4099, 167):
        arguments, options = make_call(index, length, page)
        got, want = score_window(*arguments, **options), plain(score_window)(*arguments, **options)
        assert torch.equal(got[:, :SINK], want[:, :SINK])
        got, want = got[:, SINK:], want[:, SINK:]
        error = float((got - want).abs().max() / want.max())
        print(f"{index} {length}: largest error {error:.1e} of the largest score", flush=True)
        if not error < 1e-2:
            raise SystemExit("differs from the reference; not timed")


def tuning(setting: str) -> window_ops.Tuning:
    rows, tokens, stages, warps, registers = (int(value) for value in setting.split(","))
    return window_ops.Tuning(
        rows=rows, tokens=tokens, stages=stages, warps=warps, registers=registers or None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--indexes", nargs="+", default=["bf16", "int4"], choices=list(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 65536, 131072])
    parser.add_argument("--page", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--programs", type=int, default=window_ops.PROGRAMS_PER_SM)
    parser.add_argument("--splits", type=int, default=window_ops.MAX_SPLITS)
    parser.add_argument("--former", action=argparse.BooleanOptionalAction, default=True)
    for name in ("first", "second"):
        parser.add_argument(
            f"--{name}", nargs="*", default=[], metavar="ROWS,TOKENS,STAGES,WARPS,REGS"
        )
    args = parser.parse_args()
    torch.manual_seed(0)
    window_ops.PROGRAMS_PER_SM, window_ops.MAX_SPLITS = args.programs, args.splits
    print(torch.cuda.get_device_name(), flush=True)
    for index in args.indexes:
        usual = window_ops.TUNING[KINDS[index]]
        settings = [("", usual)]
        settings += [(f" [first {text}]", (tuning(text), usual[1])) for text in args.first]
        settings += [(f" [second {text}]", (usual[0], tuning(text))) for text in args.second]
        for label, passes in settings:
            window_ops.TUNING[KINDS[index]] = passes
            check(index, args.page)
            for length in args.lengths:
                arguments, options = make_call(index, length, args.page)
                device, host = times(lambda: score_window(*arguments, **options), args.repeats)  # noqa: B023
                line = f"window {index} {length}{label}: {device:.0f} us, host {host:.0f} us"
                if args.former and not label:
                    device, host = times(lambda: former(*arguments, **options), args.repeats)  # noqa: B023
                    line += f"; before {device:.0f} us, host {host:.0f} us"
                print(line, flush=True)


if __name__ == "__main__":
    main()
