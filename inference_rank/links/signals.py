# SPDX-License-Identifier: Apache-2.0
"""How the forward pass hands over to the engine of another process, and waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, SeldomRaised, word_of
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.shared_region import FlagIndex, seed_buffer
from tandemkv.cache_rank.protocol.step_ring import StepEntry
from tandemkv.kernels.step_flags import StepWait, raise_flags, send_rows, wait_flags
from tandemkv.kernels.streams import (
    FORWARD_PRIORITY,
    LANE_PRIORITY,
    LOWEST_PRIORITY,
    shared_stream,
)

from .base import DecodeRows
from .connection import SharedConnection


class HostSignals:
    """The forward pass's side of a step's flags and staging. Used by the thread that queues it.

    The flags are in host memory: what is written is seen at once, in order. Of several cache ranks,
    in the order of their KV heads, each gets the queries of its heads, and a wait ends when all
    have answered. One that is lost is handed nothing, and answers no wait.
    """

    is_captured = False
    """Whether steps may be captured in CUDA graphs, so that calls are not seen when they run."""

    def __init__(self, connections: Sequence[SharedConnection], num_layers: int) -> None:
        self._all, self._at = tuple(connections), FlagIndex(num_layers)

    def begin(self, entry: StepEntry, step: DecodeRows | None) -> bool:
        """Announce a step, of decode `step`, that what follows is about.

        Nobody hears of it unless all have ended the one before. False: the engine is lost.
        """
        del step
        if not self.await_finished(entry.step - 1):
            return False
        # One that is lost by now answers no wait, and the others have heard of the step.
        heard = [connection for connection, _ in self._connected()]
        for connection in heard:
            connection.announce(entry)
        return bool(heard)

    def await_finished(self, step: int) -> bool:
        """Let what follows wait until the engine has done all of `step`; False: it is lost."""
        return self._wait(self._at.FINISHED, step)

    def put_stream(self, layer: int, stream: torch.Tensor) -> None:
        """Hand over the residual stream ``[B, hidden_size]`` of `layer`.

        Each engine predicts the queries of its heads from all of it. It has to stay as it is until
        `join_sent`.
        """
        for connection, _ in self._connected():
            connection.tensors["streams"][layer, : len(stream)].copy_(stream)
        self.raise_input(layer)

    def put_query(self, layer: int, query: torch.Tensor) -> None:
        """Hand over the query ``[B, Hq, D]`` of `layer`."""
        for connection, shard in self._connected():
            connection.tensors["queries"][layer, : len(query)].copy_(shard.of(query, 1))
        self._raise(self._at.query(layer))

    def put_windows(self, layer: int, windows: Sequence[torch.Tensor]) -> None:
        """Hand over the last queries ``[W, Hq, D]`` of finished prompts."""
        whole = torch.cat(tuple(windows))
        for connection, shard in self._connected():
            seed_buffer(connection.tensors, layer)[: len(whole)].copy_(shard.of(whole, 1))

    def raise_input(self, layer: int) -> None:
        """Tell that K/V, and prompt queries, of `layer` are in place."""
        self._raise(self._at.input(layer))

    def raise_end(self) -> None:
        """Tell that all tokens of a decode step are stored."""
        self.raise_input(self._at.end)

    def await_ready(self, layer: int) -> bool:
        """Wait until the engine is done with `layer`; False: it is lost.

        Attention needs all heads.
        """
        return self._wait(self._at.ready(layer))

    def end(self) -> bool:
        """End a step: SGLang may write to the request table once the engine has read it.

        False: the engine is lost.
        """
        return self._wait(self._at.LOADED)

    def is_done(self, step: int) -> bool:
        """Whether all of `step`, whose results have come to the host, was done by the engine.

        Waits until the engine has kept what it needs to go on.
        """
        return all(connection.await_finish(step) for connection in self._all)

    def give_up(self) -> None:
        """Let the engine end the present step without what was not raised for it."""
        for connection in self._all:
            connection.give_up()

    def drain(self) -> bool:
        """Wait until what was queued has run; False: some of it was lost.

        An engine captures while no step is under way, and not before the next epoch once one is
        lost.
        """
        return True

    def mask(self) -> None:
        """Let waits return at once and raises do nothing, until `begin`."""

    def forget_lost(self) -> None:
        """Let what was not answered be that of an epoch that is over: all its passes have ended."""

    def join_sent(self) -> None:
        """Let what follows wait until the stream is handed over."""

    def ready_wait(self, layer: int) -> StepWait | None:
        """Return that wait for a kernel that makes it behind its own work; None: none can."""
        del layer
        return None

    def await_output(self, layer: int, size: int) -> bool:
        """Wait for what the engine has attended to for `size` requests; False: it is lost."""
        del size
        return self.await_ready(layer)

    def _connected(self) -> Iterator[tuple[SharedConnection, HeadShard]]:
        for connection in self._all:
            if connection.lost_reason is None:
                yield connection, connection.shard

    def _raise(self, flag: int) -> None:
        for connection in self._all:
            connection.raise_to(flag)

    def _wait(self, flag: int, step: int | None = None) -> bool:
        return all(connection.wait(flag, step) for connection in self._all)


class StreamSignals(HostSignals):
    """Flags in GPU memory: waiting and raising are kernels of the current stream.

    Of several cache ranks each gets the queries of its heads, and a wait is one kernel that polls
    the flags of all. A wait that ends after `timeout_s` masks all that follows
    (`tandemkv.kernels.step_flags`), and the step is lost, for all of them. With `sends_beside` the
    engines are on other GPUs, or to be taken for so: streams are sent beside the forward pass, not
    within it.
    """

    is_captured = True

    def __init__(
        self,
        connections: Sequence[SharedConnection],
        num_layers: int,
        *,
        timeout_s: float,
        sends_beside: bool = False,
    ) -> None:
        super().__init__(connections, num_layers)
        homes = self._all[0].tensors.homes
        device = homes.here
        self._beside = stream_beside(device, homes.engine) if sends_beside else None
        self._has_sent = False
        self._timeout_s = timeout_s
        self._flags = [
            GpuFlags(each.tensors, num_layers, number) for number, each in enumerate(self._all)
        ]
        common = self._flags[0].to_inference
        self._seldom = SeldomRaised((common, *(flags.to_engine for flags in self._flags)))

        def word() -> torch.Tensor:
            return torch.zeros(1, dtype=torch.int32, device=device)

        self._step, self._previous, self._lost = word(), word(), word()
        self._lost_on_host = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._is_masked = False
        self._aborts = shared_stream(device, LANE_PRIORITY, number=7)
        for each in self._all:
            each.end_waits = self.end_waits

    def end_waits(self) -> None:
        """End the waits that are under way, and all later ones of this epoch.

        Safe from any thread. Without it a pass that is under way ends at the limit of its wait.
        """
        if self._aborts is None:
            self._lost.fill_(1)
            return
        with torch.cuda.device(self._aborts.device), torch.cuda.stream(self._aborts):
            self._lost.fill_(1)

    @property
    def lost_step(self) -> int:
        """First step that the engine did not answer in time, 0: none.

        Of all steps whose results have come to the host.
        """
        return 0 if self._is_masked else int(self._lost_on_host[0])

    def begin(self, entry: StepEntry, step: DecodeRows | None) -> bool:
        """See `HostSignals.begin`: the GPU waits for the end of the step before."""
        lost = self.lost_step
        # Whoever has found one lost has ended the waits. Only if nobody has, none answered in time.
        if lost and not self._is_lost():
            for each in self._all:
                each.mark_lost(f"step {lost} was not answered within {self._timeout_s:g} s")
        if not self._unmask():
            return False
        for each in self._all:
            each.announce(entry)
        self._previous.fill_(word_of(entry.step - 1))
        self._step.fill_(word_of(entry.step))
        self._await_finished()
        self._seldom.keep_up(entry.step, lost=self._lost)
        if step is not None:
            size, is_lost = len(step.rows), self._lost != 0
            for each in self._all:
                _write(each.tensors["step_rows"][:size], step.rows, is_lost)
                _write(each.tensors["step_lengths"][:size], step.lengths, is_lost)
        for flags in self._flags:
            self._queue_raise(flags.begin)
        return True

    def await_finished(self, step: int) -> bool:
        """See `HostSignals.await_finished`; not to be captured."""
        if not self._unmask():
            return False
        self._previous.fill_(word_of(step))
        self._await_finished()
        return self.end()  # nothing else of this pass would tell what was lost

    def drain(self) -> bool:
        """See `HostSignals.drain`."""
        if self._step.is_cuda:
            torch.cuda.current_stream(self._step.device).synchronize()
        return not self.lost_step and not self._is_lost()

    def mask(self) -> None:
        """See `HostSignals.mask`."""
        if not self._is_masked:
            self._lost.fill_(1)
            self._is_masked = True

    def forget_lost(self) -> None:
        """See `HostSignals.forget_lost`; else the next step would end the epoch that is new."""
        if self._aborts is not None:  # the next step must not be masked by it
            self._aborts.synchronize()
        self._is_masked = True

    def put_stream(self, layer: int, stream: torch.Tensor) -> None:
        """See `HostSignals.put_stream`."""
        if self._beside is None:
            self._send_stream(layer, stream)
            return
        self._beside.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(self._beside):
            self._send_stream(layer, stream)
        self._has_sent = True

    def _send_stream(self, layer: int, stream: torch.Tensor) -> None:
        size = len(stream)
        for each, flags in zip(self._all, self._flags, strict=True):
            out, input_flags = each.tensors["streams"][layer, :size], flags.input(layer, size)
            send_rows(stream, out, input_flags, step=self._step, lost=self._lost)

    def join_sent(self) -> None:
        """See `HostSignals.join_sent`."""
        if self._has_sent and self._beside is not None:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
        self._has_sent = False

    def put_query(self, layer: int, query: torch.Tensor) -> None:
        """See `HostSignals.put_query`."""
        size = len(query)
        for each, flags in zip(self._all, self._flags, strict=True):
            rows = each.shard.of(query, 1).flatten(1)
            out = each.tensors["queries"][layer, :size].flatten(1)
            send_rows(rows, out, flags.query(layer, size), step=self._step, lost=self._lost)

    def put_windows(self, layer: int, windows: Sequence[torch.Tensor]) -> None:
        """See `HostSignals.put_windows`."""
        whole, is_lost = torch.cat(tuple(windows)), self._lost != 0
        for each in self._all:
            out = seed_buffer(each.tensors, layer)[: len(whole)]
            _write(out, each.shard.of(whole, 1), is_lost)

    def raise_input(self, layer: int) -> None:
        """See `HostSignals.raise_input`."""
        for flags in self._flags:
            self._queue_raise(flags.input(layer))

    def raise_end(self) -> None:
        """See `HostSignals.raise_end`."""
        for flags in self._flags:
            self._queue_raise(flags.end)

    def await_ready(self, layer: int) -> bool:
        """See `HostSignals.await_ready`: attention needs all heads."""
        self._queue_wait(self._ready(layer), self._step)
        return True

    def ready_wait(self, layer: int) -> StepWait | None:
        """See `HostSignals.ready_wait`."""
        return StepWait(
            flags=self._ready(layer), step=self._step, lost=self._lost,
            timeout_s=self._timeout_s,
        )  # fmt: skip

    def await_output(self, layer: int, size: int) -> bool:
        """See `HostSignals.await_output`: a flag a row."""
        self._queue_wait(self._ready(layer, size), self._step)
        return True

    def end(self) -> bool:
        """See `HostSignals.end`: the next `begin` waits. What was lost comes with the results."""
        self._lost_on_host.copy_(self._lost, non_blocking=True)
        return True

    def is_done(self, step: int) -> bool:
        """See `HostSignals.is_done`: its results came with what was lost until then."""
        lost = self.lost_step
        return not self._is_lost() and (not lost or word_of(step - lost) < 0)

    def give_up(self) -> None:
        """See `HostSignals.give_up`: the engine's own waits end."""

    def _is_lost(self) -> bool:
        return any(each.is_lost() for each in self._all)

    def _ready(self, layer: int, size: int = 1) -> torch.Tensor:
        return self._flags[0].all_ready(layer, len(self._all), size)

    def _await_finished(self) -> None:
        self._queue_wait(self._flags[0].all_finished(len(self._all)), self._previous)

    def _unmask(self) -> bool:
        """Let waits and raises be made; False: an engine is lost, and they stay as `mask` has them.

        Looks once more at the end: one that is lost meanwhile has ended waits, and that is undone.
        """
        if self._is_masked and not self._is_lost():
            self._lost.zero_()
            self._lost_on_host.zero_()
            self._is_masked = False
            self._seldom.forget()
        if self._is_lost():
            self.mask()
            return False
        return True

    def _queue_raise(self, flags: torch.Tensor) -> None:
        raise_flags(flags, step=self._step, lost=self._lost)

    def _queue_wait(self, flags: torch.Tensor, step: torch.Tensor) -> None:
        wait_flags(flags, step=step, lost=self._lost, timeout_s=self._timeout_s)


def stream_beside(device: torch.device, cache_device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream for what is sent beside the forward pass; None on a CPU.

    On the cache rank's own GPU, whose lanes spin until it has arrived, it must not come to lie
    behind them in a queue of the GPU: it is none of theirs, and of the forward pass's priority.
    """
    if device != cache_device:
        return shared_stream(device, LOWEST_PRIORITY)
    return shared_stream(device, FORWARD_PRIORITY, number=1)


def _write(out: torch.Tensor, value: torch.Tensor, is_lost: torch.Tensor) -> None:
    """Copy `value` to `out`, unless ``is_lost [1]``: the engine may still read what is there.

    It has not finished the step before then, whose results may have been taken all the same.
    """
    torch.where(is_lost, out, value, out=out)
