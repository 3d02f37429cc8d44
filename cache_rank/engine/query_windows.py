# SPDX-License-Identifier: Apache-2.0
"""The latest queries of every row, on the device, for policies that predict from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.cache_rank.policies.windowed import WindowedPolicy
from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.kernels.query_window import push_and_predict
from tandemkv.kernels.to_device import to_device

# Larger than any position: such a row's window holds nothing.
_NEVER = 1 << 62


class DeviceQueryWindows:
    """What `WindowedPolicy` keeps on the host, in fixed tensors that a graph can replay.

    A window is a ring by position, without a gap since the row's first position in it. That one
    number per row takes the place of counts: pushing needs no branch, and a step that is replayed
    writes the same again. It has a place more than is read, for two steps may have to be done
    again: the first must not find the query of the second in place of its oldest. Queries stay as
    they come, after RoPE and in the model's dtype; the kernel rotates them to the position of the
    prediction's use, which equals un-rotating first
    (`tandemkv.kernels.query_window.push_and_predict`) and loses nothing. `num_layers` are the
    selecting ones; row 0 is padding.
    """

    def __init__(
        self, policy: WindowedPolicy, *, num_layers: int, num_rows: int, allocate: Allocate
    ) -> None:
        model = policy.context.model
        options, prediction = policy.options, policy.capabilities.prediction
        assert prediction is not None
        self._prediction = prediction
        self._ridge = policy.ridge
        self._places = options.window + 2
        shape = (num_layers, num_rows, self._places, model.num_qo_heads, model.head_dim)
        dtype = getattr(torch, model.dtype)
        self._windows = allocate("query_windows", shape, dtype)
        self._starts = allocate("query_window_starts", (num_rows,), torch.int64)
        if not self._starts.any():  # else they are an earlier engine's
            self._starts.fill_(_NEVER)
        self._order: torch.Tensor | None = None
        self._back: torch.Tensor | None = None
        self._cos: torch.Tensor | None = None
        self._sin: torch.Tensor | None = None
        if options.unrotate:
            device = self._windows.device
            rotary = policy.context.rotary
            assert rotary is not None  # the policy's constructor asks for it
            if rotary.order is not None:
                self._order = rotary.order.to(device)
                self._back = self._order.argsort()
            offsets = 1 + torch.arange(options.window + 1, dtype=torch.float64)
            angles = torch.outer(offsets, rotary.inv_freq.cpu().double())
            self._cos = angles.cos().float().to(device)
            self._sin = angles.sin().float().to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the windows."""
        return self._windows.nbytes

    def begin_prompt(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget whatever `rows` held: their windows begin behind the prompt's `lengths`."""
        device = self._starts.device
        self._starts[to_device(rows, device)] = to_device(lengths, device, self._starts.dtype)

    def observe_prompt(
        self, layer: int, row: int, queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Take over the last prompt queries ``[n, Hq, D]`` of `row` at `positions` ``[n]``.

        `layer` counts the selecting layers.
        """
        queries, positions = self._ordered(queries[-self._places :]), positions[-self._places :]
        self._windows[layer, row, positions % self._places] = queries.to(self._windows.dtype)
        self._starts[row] = positions[0]

    def push(
        self, layer: int, rows: torch.Tensor, query: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Take note of a step's queries ``[B, Hq, D]`` without a prediction."""
        self._windows[layer].index_put_(
            (rows, positions % self._places), self._ordered(query).to(self._windows.dtype)
        )

    def push_and_predict(
        self, layer: int, rows: torch.Tensor, query: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Take note of a step's queries and predict ``[B, Hq, D]`` float32, for the next step."""
        predicted = push_and_predict(
            self._ordered(query),
            rows,
            positions,
            self._windows[layer],
            self._starts,
            prediction=self._prediction,
            cos=self._cos,
            sin=self._sin,
            **self._ridge,
        )
        return predicted if self._back is None else predicted[..., self._back]

    def _ordered(self, queries: torch.Tensor) -> torch.Tensor:
        """Return queries in the order in which halves of heads are turned (`Rotary.order`)."""
        return queries if self._order is None else queries[..., self._order]
