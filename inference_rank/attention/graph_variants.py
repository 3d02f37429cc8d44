# SPDX-License-Identifier: Apache-2.0
"""Up to three decode graphs for each batch size: with selection, with indexing, with neither.

A graph's kernels run whether a request needs them or not. A step whose requests are all
attended to as a whole replays a graph that has nothing beside the forward pass in it; keys are
indexed for what may be selected later where a step completes a page, and only then. So does a
step between two refreshes (`refresh_every`), which attends to the resident sets as they are.
SGLang keeps graphs of several variants already (for LoRA); ours use its label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.sglang.live_model import own_backend
from tandemkv.kernels.streams import FORWARD_PRIORITY, shared_stream


class PlansApart:
    """FlashInfer's plans of the graphs of a batch size, apart.

    SGLang keeps one set of decode wrappers for a batch size and makes a new one at each capture:
    the first graph would go on reading plans that nobody writes any more, from memory that was
    given back.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._wrappers: dict[DecodeKind, dict[int, Any]] = {kind: {} for kind in DecodeKind}

    def use(self, kind: DecodeKind) -> None:
        """Let what follows plan for the graph of a kind."""
        self._backend.decode_cuda_graph_metadata = self._wrappers[kind]


class PlanFence:
    """Keeps the host from writing a plan while the GPU still has to read the one before.

    FlashInfer writes the plans of a wrapper into one pinned buffer and copies it in the stream.
    With SGLang's overlap scheduler the host plans a step while the one before it runs, whose copy
    lies behind it already; where the GPU serves other processes, too, it may be given to one of
    them just before that copy (decision record 14). Waiting for it costs nothing otherwise.
    """

    def __init__(self, device: torch.device) -> None:
        self._read = torch.cuda.Event() if device.type == "cuda" else None
        self._device = device

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Plan in the body, outside a capture."""
        if self._read is None:
            yield
            return
        self._read.synchronize()
        yield
        self._read.record(torch.cuda.current_stream(self._device))


def capture_each(
    original: Callable[..., None],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
    *more: Any,
) -> None:
    """Capture a batch size for each kind of step that the policy has.

    Raises `ContractError` if SGLang captures variants of its own (LoRA): the two cannot be told
    apart.
    """
    if variant_label is not None:
        raise ContractError(
            f"SGLang captures decode graphs of variant {variant_label!r}; tandemkv needs that "
            "label: serve without LoRA"
        )
    backend = own_backend(runner.attn_backend)
    # Those that have nothing beside them as well, so that all are captured on one stream.
    goes_first = backend.shares_gpu and backend.kinds != (DecodeKind.DENSE,)
    for kind in backend.kinds:
        backend.captured_kind = kind
        with _captured_first(runner) if goes_first else nullcontext():
            original(runner, size, forward, stream_idx, str(kind), *more)


@contextmanager
def _captured_first(runner: Any) -> Iterator[None]:
    """Capture the forward pass on a stream that goes before the cache rank's.

    A graph keeps the priorities of the streams that it was captured on, and the default is the
    lowest one. Between two GPUs it makes no difference (H200: 7.30 and 7.32 ms a step).
    """
    graphs = runner.backend
    before = getattr(graphs, "_capture_stream", None)
    if before is None:
        raise ContractError(
            f"SGLang captures decode graphs with {type(graphs).__name__}, which has no stream of "
            "its own; serve with its full CUDA graphs, or --disable-cuda-graph"
        )
    # One for all sizes: graphs reuse each other's memory within a stream only.
    graphs._capture_stream = shared_stream(before.device, FORWARD_PRIORITY)
    try:
        yield
    finally:
        graphs._capture_stream = before


def resolve(original: Callable[..., str | None], runner: Any, forward_batch: Any) -> str:
    """Return the variant that a batch needs."""
    del original
    backend, lengths = own_backend(runner.attn_backend), forward_batch.seq_lens_cpu
    return str(backend.kinds[0] if lengths is None else backend.kind_of(lengths))
