# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs for each batch size: with selection, and without.

A graph's kernels run whether a request needs them or not. A step whose requests are all
attended to as a whole replays a graph that has no selection in it, and costs what stock
SGLang's does; so does a step between two refreshes (`refresh_every`), which attends to the
resident sets as they are. SGLang keeps graphs of several variants already (for LoRA); ours use
its label.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandemkv.cache_rank.protocol.errors import ContractError

DENSE, SPARSE = "tandemkv-dense", "tandemkv-sparse"


class PlansApart:
    """FlashInfer's plans of the two graphs of a batch size, apart.

    SGLang keeps one set of decode wrappers for a batch size and makes a new one at each capture:
    the first graph would go on reading plans that nobody writes any more, from memory that was
    given back.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._wrappers: dict[bool, dict[int, Any]] = {False: {}, True: {}}

    def use(self, *, selects: bool) -> None:
        """Let what follows plan for the graph with or without selection."""
        self._backend.decode_cuda_graph_metadata = self._wrappers[selects]


def capture_both(
    original: Callable[..., None],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
) -> None:
    """Capture a batch size twice, once if the policy never selects.

    Raises
    ------
    ContractError
        If SGLang captures variants of its own (LoRA): the two cannot be told apart.
    """
    if variant_label is not None:
        raise ContractError(
            f"SGLang captures decode graphs of variant {variant_label!r}; tandemkv needs that "
            "label: serve without LoRA"
        )
    backend = runner.attn_backend
    for label in (SPARSE, DENSE) if backend.selects else (DENSE,):
        backend.captures_selection = label == SPARSE
        original(runner, size, forward, stream_idx, label)


def resolve(original: Callable[..., str | None], runner: Any, forward_batch: Any) -> str:
    """Return the variant that a batch needs."""
    backend, lengths = runner.attn_backend, forward_batch.seq_lens_cpu
    if lengths is None:
        return SPARSE if backend.selects else DENSE
    return SPARSE if backend.selects_for(lengths) else DENSE
