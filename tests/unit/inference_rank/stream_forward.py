# SPDX-License-Identifier: Apache-2.0
"""Both ranks as on GPUs, on a CPU: flags and rows lie in memory that both map (`StreamSignals`).

The engine is a thread of this process. Streams and graphs are none: what would be queued is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shared_forward import ROWS, Forward

from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.service.service import SharedEngineService
from tandemkv.inference_rank.links.shared import SharedLink
from tandemkv.inference_rank.links.signals import StreamSignals
from tandemkv.kernels.step_flags import StepWait

_CPU, _LIMIT_S = torch.device("cpu"), 30.0


class PlayedGpu(Homes):
    """A CPU that is taken for a GPU."""

    are_on_gpu = True  # type: ignore[assignment]


HOMES = PlayedGpu(inference=_CPU, engine=_CPU, here=_CPU)


class WaitingLink(SharedLink):
    """Waits where a kernel of attention would."""

    def await_set(self, layer: int) -> StepWait | None:
        wait = super().await_set(layer)
        if wait is not None:
            wait.now()
        return None


def link_by_streams(
    forward: Forward, *, sends_beside: bool, limit_s: float = _LIMIT_S
) -> SharedLink:
    """Return the link of `forward`, which waits as a GPU does, for `limit_s` at most."""
    signals = StreamSignals(
        forward.connection.parts, forward.model.num_layers, timeout_s=limit_s,
        sends_beside=sends_beside,
    )  # fmt: skip
    return WaitingLink(
        forward.connection, signals, generation_of=lambda row: 10 + row, rows_on_host=lambda: ROWS
    )


def play_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let a CPU answer for a GPU."""
    stream = SimpleNamespace(synchronize=lambda: None)
    for name in ("set_device", "synchronize"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    near = SimpleNamespace(uuid="GPU-near")
    patch.setattr(torch.cuda, "get_device_properties", lambda _: near)


@contextmanager
def engine_of(
    run_dir: RunDir, model_dir: Path, settings: RankSettings, rank: int = 0,
    homes: Homes | None = None,
) -> Iterator[SharedEngineService]:  # fmt: skip
    """Run the cache rank with number `rank`."""
    served, stop = threading.Event(), threading.Event()
    engine = SharedEngineService(
        run_dir=run_dir, model_dir=model_dir, settings=settings, max_rows=3, homes=homes or HOMES,
        rank=rank,
    )  # fmt: skip
    thread = threading.Thread(target=engine.run, args=(stop, served.set))
    thread.start()
    try:
        assert served.wait(30.0)
        yield engine
    finally:
        stop.set()
        thread.join()
