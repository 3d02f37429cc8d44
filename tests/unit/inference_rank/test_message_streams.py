# SPDX-License-Identifier: Apache-2.0
"""Link ``message`` as between GPUs, with one cache rank and with several, on a CPU.

All that is not CUDA is what runs there: the link's side waits for flags in memory that it maps, as
its captured graphs do, the pumps' lanes queue messages for wires, weights go once for each cache
rank. Wires are queues of this process here, and engines are threads of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar

import pytest
import torch
from message_pumps import FarForward, Pumps, by_link_shared, check_same
from shared_forward import LENGTHS, ROWS, settings_of
from stream_forward import HOMES, engine_of, link_by_streams, play_gpus
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.message.keys import make_keys
from tandemkv.cache_rank.protocol.models.predictor_weights import PREDICTOR_PREFIX, put_weights
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.pump import far_service, gpu_link
from tandemkv.cache_rank.service import service
from tandemkv.inference_rank.links.base import DecodeRows
from tandemkv.inference_rank.links.shared import SharedLink
from tandemkv.kernels.query import QueryWeights

pytestmark = pytest.mark.timeout(120)
_SHAPE = CONFIG | {"num_key_value_heads": 3, "num_attention_heads": 12, "head_dim": 8}
_SELECTION: dict[str, object] = {"index_dtype": "int8", "sample_tokens": 8}


class QueueWire:
    """See `NcclWire`: both ends are in this process."""

    opened: ClassVar[dict[bytes, SimpleQueue[torch.Tensor]]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self, end: int, _: torch.device, *, sends: bool, timeout_s: float, most_ctas: int
    ) -> None:
        del timeout_s, most_ctas
        self.sends, self.place, self._reason = sends, b"", ""
        if end == 0:
            self.place = str(next(self.numbers)).encode()
            self._queue = self.opened[self.place] = SimpleQueue()

    def meet(self, place: bytes = b"") -> None:
        self._queue = self.opened[self.place or place]

    def send(self, body: torch.Tensor) -> None:
        self._queue.put(body.clone())

    def receive(self, out: torch.Tensor) -> None:
        while True:
            try:
                out.copy_(self._queue.get(timeout=0.01))
                return
            except Empty:
                if self._reason:
                    raise CacheRankLostError(self._reason) from None

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason


class StreamForward(FarForward):
    """The forward pass of a GPU; the weights that it hands over are of no use to the policies."""

    homes = HOMES

    def connect(self) -> None:
        torch.manual_seed(3)
        model, size = self.model, self.model.num_qo_heads * self.model.head_dim
        layer = QueryWeights(
            weight=torch.randn(size, model.hidden_size), head_dim=model.head_dim,
            norm=torch.randn(model.hidden_size),
        )  # fmt: skip
        self.weight = layer.weight
        for part in self.connection.parts:
            angles = torch.rand(16, model.head_dim)
            put_weights(part.own, [layer] * model.num_layers, angles, part.shard)
        super().connect()

    def make_link(self) -> SharedLink:
        return link_by_streams(self, sends_beside=True)

    def rehearse(self) -> None:
        """Have decode steps captured, as SGLang does before the first request."""
        lengths = torch.ones(len(ROWS), dtype=torch.int64)
        rows = DecodeRows(
            rows=torch.zeros_like(lengths), lengths=lengths, lengths_on_host=lengths,
            req_to_token=self.table, num_cold=self.num_cold, is_rehearsal=True,
        )  # fmt: skip
        self.link.begin_decode(DecodeKind.SELECTING, rows)
        self.link.end_step()


@pytest.fixture(autouse=True)
def _played_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch)
    monkeypatch.setattr(gpu_link, "NcclWire", QueueWire)
    monkeypatch.setattr(gpu_link, "prepare_nccl", lambda _: None)
    open_wires, gpu = gpu_link.open_wires, torch.device("cuda", 0)
    monkeypatch.setattr(
        gpu_link,
        "open_wires",
        lambda end, _, *more, **named: open_wires(end, gpu, *more, **named),
    )
    for far in (far_service, service):
        monkeypatch.setattr(far, "gpu_uuids", lambda _: ("GPU-far", "GPU-far"))


@contextmanager
def _played(
    folder: Path, policy: str, count: int, selection: dict[str, object]
) -> Iterator[StreamForward]:
    """A forward pass and so many cache ranks."""
    placement: dict[str, object] = {"link": "message", "two_gpus": True, "head_shards": count}
    settings = settings_of(policy, placement, **selection)
    near, far = RunDir.create(folder / "near"), RunDir.create(folder / "far")
    model_dir, keys = write_model(folder / "model", _SHAPE), folder / "keys"
    make_keys(keys)
    with ExitStack() as running:
        pumps = []
        for rank in range(settings.placement.head_shards):
            here, there = (x.of_rank(rank, create=True) for x in (near, far))
            running.enter_context(engine_of(there, model_dir, settings, rank))
            pumps.append(Pumps(here, there, settings, keys, rank, homes=HOMES))
            running.callback(pumps[-1].close)
        played = StreamForward(near, model_dir, settings)
        played.pumps = pumps
        running.callback(played.kept.close)
        running.callback(played.connection.close)
        yield played


@pytest.mark.parametrize(
    ("policy", "heads", "more"),
    [
        ("oracle", [3], {}),
        ("oracle", [1, 2], {"exact_layers": (1,)}),
        ("last_query", [1, 1, 1], {}),
        ("last_query", [3], {"exact_layers": (1,)}),
    ],
    ids=["one", "two", "three", "for the next step"],
)
def test_what_is_attended_to_is_that_of_one_cache_rank_that_maps_memory(
    tmp_path: Path, policy: str, heads: list[int], more: dict[str, object]
) -> None:
    selection = _SELECTION | more
    want = by_link_shared(tmp_path, policy, config=_SHAPE, **selection)
    with _played(tmp_path, policy, len(heads), selection) as played:
        played.rehearse()
        found = played.run()
        assert played.num_lost == 0
        check_same(found, want)
        kept = [pumps.far._kept for pumps in played.pumps]
        assert [each["kv"].shape[3] for each in kept] == heads
        slots = torch.cat([played.slots[row - 1, :n] for row, n in zip(ROWS, LENGTHS, strict=True)])
        here = played.kept["kv"][:, :, slots.long()]
        assert torch.equal(played.far_kv()[:, :, slots.long()], here), "which stay here as well"
        weights = torch.cat([each[f"{PREDICTOR_PREFIX}weight"] for each in kept], dim=1)
        assert torch.equal(weights, played.weight.expand_as(weights)), "of its heads, each"


def test_all_go_on_with_a_host_that_has_lost_its_part_of_the_k_and_v(tmp_path: Path) -> None:
    """Waits of the forward pass end at once; the lanes of both pumps are made anew."""
    with _played(tmp_path, "last_query", 2, _SELECTION) as played:
        played.rehearse()
        want, connection = played.run(), played.connection
        played.pumps[-1].lose_far()
        deadline = time.monotonic() + 30
        while connection.lost_reason is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        connection.leave("another cache rank is lost")
        played.link.rewind()
        opened = connection.open_connection(timeout_s=30)
        assert opened.has_lost_memory
        opened.close()
        connection.forget_rows()
        connection.adopt(connection.open_connection(timeout_s=30))
        connection.resume(())
        assert all(part.await_finish(part.step) for part in connection.parts)
        connection.confirm(connection.step)
        check_same(played.run(), want)
