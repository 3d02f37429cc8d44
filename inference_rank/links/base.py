# SPDX-License-Identifier: Apache-2.0
"""What the attention backend asks of a link to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.kernels.step_flags import StepWait


class StepLostError(CacheRankLostError):
    """The engine did not do its part of the pass under way: whatever the pass yields is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendRow:
    """One request of a prefill step."""

    row: int
    """Of the request table."""
    prefix_len: int
    length: int
    """Tokens before the step, and after it."""
    table: torch.Tensor
    """``[length]`` int32, the slot of each position."""
    window: tuple[int, int] | None = None
    """Where the prompt's last queries are in the step's tokens, if its resident set is to be filled
    now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The requests of a decode step."""

    rows: torch.Tensor
    lengths: torch.Tensor
    """``[B]`` integers on the device of the forward pass; lengths after the step."""
    lengths_on_host: torch.Tensor
    """The same on the host."""
    req_to_token: torch.Tensor
    """``[rows, max_context]`` int32, the slot of each position."""
    num_cold: int
    """Longest request that is not selected for."""
    slow: torch.Tensor | None = None
    """``[B]`` bool on the host, with `EngineProgram.slow_steps`: who attends to everything in this
    step, and is selected for."""
    is_rehearsal: bool = False
    """Whether the step is run to be captured, and its requests are none."""


class Link(Protocol):
    """Carries what the forward pass has to the engine, and waits for what the engine has done.

    Called in the order of the forward pass, by the thread that queues it. What is called between
    `begin_decode` and `end_step` queues work of fixed shape on a GPU, and can be captured.

    """

    @property
    def program(self) -> EngineProgram:
        """Which layers select, for whom and when."""

    def begin_extend(self, requests: Sequence[ExtendRow]) -> None:
        """Announce a prefill step. What was known of earlier tenants of its rows is forgotten."""

    def extend(self, layer: int, slots: torch.Tensor, windows: Sequence[torch.Tensor]) -> None:
        """Index the keys just written at `slots` ``[n]``, and fill sets of finished prompts.

        `windows` are the queries ``[W, Hq, D]`` of the requests that have a window, in their
        order; none for a layer that attends to everything.
        """

    def end_extend(self) -> None:
        """End a prefill step, with its last layer."""

    def seed_identity(self, rows: torch.Tensor, tables: torch.Tensor | None) -> None:
        """Make the first R tokens of `rows` ``[n]`` resident, ``tables [n, R]`` their slots.

        Without tables they lie there already.
        """

    def begin_decode(self, kind: DecodeKind, step: DecodeRows) -> None:
        """Begin a decode step; not captured."""

    def enter_attention(self, layer: int) -> None:
        """Let the forward pass go on to the attention of `layer`."""

    def select_with_query(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: Any,
        forward_batch: Any, save_kv_cache: bool,
    ) -> None:  # fmt: skip
        """Hand over the query ``[B, Hq, D]`` of `layer`, where it is selected or attended with.

        `k`, `v`, SGLang's layer `owner` and `forward_batch` are what SGLang's pool takes to store
        the step's token.
        """

    def remote_output(self, layer: int) -> torch.Tensor | None:
        """Wait for the attention of `layer` where the K/V lie, ``[B, Hq * D]``; None if it is here.

        Of a sparse layer it is that of slow requests, the others' is 0. Valid until the next
        layer's.
        """

    def attend_selected(self, layer: int, query: torch.Tensor) -> torch.Tensor | None:
        """Let the policy attend with ``query [B, Hq, D]`` where it attends itself; else None.

        Returns output and, last, natural log-sum-exp, ``[B, Hq, D + 1]`` float32, to be merged with
        what is attended to here; see `Engine.attend_selected`.
        """

    def await_set(self, layer: int) -> StepWait | None:
        """Wait until the resident set of `layer` is ready for this step.

        Returns what the caller has to wait for instead, or None.
        """

    def resident_positions(self, layer: int) -> torch.Tensor | None:
        """Return the position in each resident slot, ``[rows, H, R]`` int32, -1 where empty.

        None for a layer that nothing is selected for: its first tokens are resident. For probes,
        between `await_set` and `attended`.
        """

    def attended(self, layer: int, query: torch.Tensor, batch_size: int) -> None:
        """Note that `layer` has stored its token and attended with ``query [B, Hq, D]``."""

    def end_step(self) -> None:
        """End a decode step, with its last layer; what nobody waits for may go on."""

    def recover(self) -> None:
        """Forget what a step that failed has left to be waited for."""
