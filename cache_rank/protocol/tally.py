# SPDX-License-Identifier: Apache-2.0
"""Counters whose values are found on a device, brought to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceTally:
    """Adds up device scalars and enters them into attributes of `counters`.

    On a CPU they are entered at once. On a GPU `flush` starts a copy and enters what the copy
    before it brought: never a wait, and one step behind.

    Parameters
    ----------
    counters : object
        With an integer attribute for each name.
    names, gauges : Sequence[str]
        What is added up, and what is replaced by each new value.
    device : torch.device
        Of the scalars.
    """

    def __init__(
        self,
        counters: object,
        names: Sequence[str],
        device: torch.device,
        *,
        gauges: Sequence[str] = (),
    ) -> None:
        self._counters = counters
        self._index = {name: i for i, name in enumerate((*names, *gauges))}
        self._before = [int(getattr(counters, name)) for name in names] + [0] * len(gauges)
        self._is_host = device.type == "cpu"
        self._copied: torch.cuda.Event | None = None
        if not self._is_host:
            self._values = torch.zeros(len(self._index), dtype=torch.int64, device=device)
            self._on_host = torch.zeros(len(self._index), dtype=torch.int64, pin_memory=True)

    def add(self, name: str, value: torch.Tensor | int) -> None:
        """Add `value`, a scalar ``[]`` on the device or a number."""
        if self._is_host:
            setattr(self._counters, name, getattr(self._counters, name) + int(value))
        else:
            self._values[self._index[name]].add_(value)

    def set(self, name: str, value: torch.Tensor | int) -> None:
        """Replace the gauge `name`."""
        if self._is_host:
            setattr(self._counters, name, int(value))
        else:
            target = self._values[self._index[name]]
            if isinstance(value, torch.Tensor):
                target.copy_(value)
            else:
                target.fill_(value)

    def flush(self) -> None:
        """Enter what is known by now."""
        if self._is_host or (self._copied is not None and not self._copied.query()):
            return
        if self._copied is not None:
            for (name, _), before, value in zip(
                self._index.items(), self._before, self._on_host.tolist(), strict=True
            ):
                setattr(self._counters, name, before + value)
        self._on_host.copy_(self._values, non_blocking=True)
        self._copied = torch.cuda.current_stream(self._values.device).record_event()
