# SPDX-License-Identifier: Apache-2.0
"""Messages of link `message` between two GPUs: bandwidth, round trips, and what a host queues.

    python tests/bench/nccl_wires.py --ctas 2,4,8,16 --kib 64,1024,4096,16384,65536 --out wires.json

Two processes with a GPU each are connected as two pumps are, by a wire of NCCL in each direction.
``gb_per_s_<programs>_<KiB>kib`` is of messages queued one behind another; a round is a message of
64 KiB there and one of 1 MiB back, as a layer of a decode step has them. Of captured rounds each
direction is a CUDA graph, but for the first message there, and so is what they wait for, with flags
between them; ``--ahead`` steps of a graph are queued before the next graph, as threads may do it.
They are measured first: there it shows whether graphs of one process that wait for each other run
beside each other, and whether the host can queue so much. Under CUDA MPS, as served.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.message.data_plane import CACHE_END, INFERENCE_END
from tandemkv.cache_rank.protocol.message.nccl_wire import NcclWire, prepare_nccl
from tandemkv.cache_rank.pump.captured_steps import CapturedSteps
from tandemkv.cache_rank.pump.stream_lanes import rehearse_flags
from tandemkv.kernels.step_flags import raise_flags, wait_flags
from tandemkv.server.evaluation.bench.report import Row, Spread, make_report, write_report
from tandemkv.server.evaluation.provenance import visible_gpu

REPEATS, ROUNDS, WAIT_S, FLAG_S = 9, 36, 60.0, 5.0
CALLS, KEY = 20, (0, 1)
"""Kernels beside each transfer of a captured step; what that is called."""
OUT_BYTES, BACK_BYTES = 64 << 10, 1 << 20


class End:
    """One of the two processes, with its wires.

    Parameters
    ----------
    number : int
        `INFERENCE_END`, which measures, or `CACHE_END`.
    pipe : Connection
        To the other.
    most_ctas : int
        Programs of a transfer.
    """

    def __init__(self, number: int, pipe: Connection, most_ctas: int) -> None:
        self.device, self._pipe = torch.device("cuda", number), pipe
        self._is_near = number == INFERENCE_END
        torch.cuda.set_device(self.device)
        self.out, self.back = (
            NcclWire(
                number, self.device, sends=outward == self._is_near, timeout_s=WAIT_S,
                most_ctas=most_ctas,
            )
            for outward in (True, False)
        )  # fmt: skip
        wires = (self.out, self.back)
        if self._is_near:
            pipe.send([wire.place for wire in wires])
        places = ("", "") if self._is_near else self._hear()
        for wire, place in zip(wires, places, strict=True):
            wire.meet(place or b"")
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._asked, self._answered = (self._words(ROUNDS) for _ in range(2))
        self._lost = self._words(1)

    def close(self) -> None:
        """Break the wires."""
        self.meet()
        for wire in (self.out, self.back):
            wire.abort("the measurement is over")
        for thread in threading.enumerate():  # one that is not done when Python ends, ends it badly
            if thread.name == "nccl abort":
                thread.join(WAIT_S)

    def meet(self) -> None:
        """Wait for the other end, with nothing queued."""
        torch.cuda.synchronize(self.device)
        self._pipe.send(None)
        self._hear()

    def times(self, nbytes: int, count: int) -> tuple[list[float], list[float]]:
        """Seconds of a message to the other end, and of queueing one, of `REPEATS` runs."""
        room = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        post = self.out.send if self._is_near else self.out.receive
        return self._timed([lambda: post(room)] * count)

    def rounds(self) -> tuple[list[float], list[float]]:
        """Seconds of a round, and of queueing its two messages."""
        small = torch.zeros(OUT_BYTES, dtype=torch.uint8, device=self.device)
        large = torch.zeros(BACK_BYTES, dtype=torch.uint8, device=self.device)

        def one() -> None:
            if self._is_near:
                self.out.send(small)
                self.back.receive(large)
            else:
                self.out.receive(small)
                self.back.send(large)

        return self._timed([one] * ROUNDS)

    def captured_rounds(self, ahead: int) -> tuple[list[float], list[float]]:
        """Seconds of a round whose directions, and their ends, are CUDA graphs; and of a replay.

        `ahead` steps are queued at once. Raises `RuntimeError` if one waited for another in vain.
        """
        rehearse_flags(self.device, FLAG_S)
        streams = [torch.cuda.Stream(self.device, priority=n) for n in (-1, -1, -2)]
        graphs, bodies = [CapturedSteps(stream) for stream in streams], self._bodies()
        for graph, body in zip(graphs, bodies, strict=True):  # which have what graphs name
            graph.capture(KEY, (), body)
        beside = torch.zeros(OUT_BYTES, dtype=torch.uint8, device=self.device)
        first = partial(self.out.send if self._is_near else self.out.receive, beside)
        took, queued = [], []
        for _ in range(REPEATS):
            self.meet()
            begin = time.perf_counter()
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(ahead):
                        if graph is graphs[0]:
                            first()
                        graph.replay(KEY)
            queued.append((time.perf_counter() - begin) / (ahead * len(graphs)))
            torch.cuda.synchronize(self.device)
            took.append((time.perf_counter() - begin) / (ahead * ROUNDS))
        for graph in graphs:
            graph.close()
        if int(self._lost):
            raise RuntimeError(f"step {int(self._lost)}: a graph waited for another in vain")
        return took, queued

    def _bodies(self) -> list[Callable[[], None]]:
        """Return a step of each direction, and of what asks or answers."""
        small = torch.zeros(OUT_BYTES, dtype=torch.uint8, device=self.device)
        large = torch.zeros(BACK_BYTES, dtype=torch.uint8, device=self.device)
        asked, answered = self._asked, self._answered
        if self._is_near:
            return [
                self._body(lambda wait, _: (wait(asked), self.out.send(small))),
                self._body(lambda _, tell: (self.back.receive(large), tell(answered))),
                self._body(lambda wait, tell: (tell(asked), wait(answered))),
            ]
        return [
            self._body(lambda _, tell: (self.out.receive(small), tell(asked))),
            self._body(lambda wait, _: (wait(answered), self.back.send(large))),
            self._body(lambda wait, tell: (wait(asked), tell(answered))),
        ]

    def _body(self, do: Callable[[Any, Any], Any]) -> Callable[[], None]:
        """Return what does so in each round of a step, with a number of the step of its own."""
        step, (here, there) = self._words(1), self._words(OUT_BYTES // 2).view(2, -1)

        def body() -> None:
            step.add_(1)
            for number in range(ROUNDS):
                flag = slice(number, number + 1)
                for _ in range(CALLS):
                    here.add_(1)
                there.copy_(here)  # no kernel
                do(
                    lambda words, at=flag: wait_flags(
                        words[at], step=step, lost=self._lost, timeout_s=FLAG_S
                    ),
                    lambda words, at=flag: raise_flags(words[at], step=step, lost=self._lost),
                )

        return body

    def _words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _timed(self, posts: list[Any]) -> tuple[list[float], list[float]]:
        took, queued = [], []
        for _ in range(REPEATS + 1):
            self.meet()
            begin = time.perf_counter()
            with torch.cuda.stream(self._stream):
                for post in posts:
                    post()
            queued.append((time.perf_counter() - begin) / len(posts))
            self._stream.synchronize()
            took.append((time.perf_counter() - begin) / len(posts))
        return took[1:], queued[1:]

    def _hear(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("the other end says nothing")
        return self._pipe.recv()


def run(number: int, pipe: Connection, ctas: list[int], sizes: list[int], ahead: int) -> list[Row]:
    """Measure at one end; rows of the inference rank's."""
    prepare_nccl("127.0.0.1")
    rows = []
    for most in ctas:
        end = End(number, pipe, most)
        for name, found in zip(("round", "queue"), end.captured_rounds(ahead), strict=True):
            micros = [1e6 * seconds for seconds in found]
            rows.append(Row.of(f"captured_{name}_us_{most}", Spread.of(micros), "us"))
        for kib in sizes:
            took, queued = end.times(kib << 10, 64 if kib <= 4096 else 16)
            speeds = [(kib << 10) / seconds / 1e9 for seconds in took]
            rows.append(Row.of(f"gb_per_s_{most}_{kib}kib", Spread.of(speeds), "GB/s"))
            micros = [1e6 * seconds for seconds in queued]
            rows.append(Row.of(f"queued_us_{most}_{kib}kib", Spread.of(micros), "us"))
        took, _ = end.rounds()
        micros = [1e6 * seconds for seconds in took]
        rows.append(Row.of(f"round_us_{most}", Spread.of(micros), "us", note="64 KiB, 1 MiB back"))
        end.close()
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ctas", default="2,4,8,16")
    parser.add_argument("--kib", default="64,1024,4096,16384,65536")
    parser.add_argument("--ahead", type=int, default=2, help="captured steps queued at once")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ctas, sizes = ([int(x) for x in text.split(",")] for text in (args.ctas, args.kib))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    given = ctas, sizes, args.ahead
    other = context.Process(target=run, args=(CACHE_END, there, *given), daemon=True)
    other.start()
    try:
        rows = run(INFERENCE_END, here, *given)
    finally:
        other.join(WAIT_S)
        other.kill()
    report = make_report("nccl_wires", rows, command=["python", *sys.argv], gpu=visible_gpu())
    write_report(report, args.out)
    for row in rows:
        print(f"{row.figure:32} {row.value:9.2f} {row.unit}")


if __name__ == "__main__":
    main()
