# SPDX-License-Identifier: Apache-2.0
"""The service between epochs: refusals, another dtype, stopping."""

import threading

import msgspec
import pytest
import torch

from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    SettingsError,
    UnsupportedModelError,
)
from tandemkv.cache_rank.protocol.handshake import open_epoch
from tandemkv.cache_rank.protocol.messages import (
    ClearSlots,
    FreeSlots,
    Goodbye,
    ReleaseRow,
    StatusRequest,
)

pytestmark = pytest.mark.timeout(120)


def test_refusals_name_the_field_and_leave_the_epoch_alone(serve, settings_of):
    served = serve()
    rank = served.connect()
    model = served.model
    for overrides, field in (
        ({"token": b"x" * 32}, "token"),
        ({"max_rows": 5000}, "max_rows"),
        ({"settings": settings_of(budget_tokens=17)}, "selection.budget_tokens"),
        ({"model": msgspec.structs.replace(model, model_hash="0" * 32)}, "model_hash"),
        ({"model": msgspec.structs.replace(model, dtype="int8")}, "dtype"),
        ({"model": msgspec.structs.replace(model, num_layers=5)}, "num_layers"),
    ):
        with pytest.raises(HandshakeRefusedError) as caught:
            served.connect(**overrides)
        assert caught.value.field == field
    assert rank.settle().epoch == 1
    assert served.counters.refused_total == 6


def test_bfloat16_epoch_after_a_float32_one(serve):
    served = serve()
    served.connect()
    served.model = msgspec.structs.replace(served.model, dtype="bfloat16")
    served.connect()
    store = served.service._resources._store
    assert store.k[0].dtype == torch.bfloat16
    assert served.thread in threading.enumerate()


def test_stop_breaks_off_a_step_under_way(serve):
    served = serve()
    rank = served.connect()
    rank.control.send(FreeSlots(epoch=1, num_slots=5))  # whose ids never come
    served.wait_for(lambda: served.service._clock._wait_started is not None)
    served.stop.set()
    served.thread.join(3)
    assert not served.thread.is_alive()


def test_a_peer_that_gave_up_is_not_waited_for(serve, monkeypatch):
    served = serve()
    going_on, started = threading.Event(), threading.Event()
    predictor = served.service._resources.predictor

    def slow(model):
        started.set()
        going_on.wait(10)
        return predictor(model)

    monkeypatch.setattr(served.service._resources, "predictor", slow)
    impatient = ControlClient(served.run_dir)
    with pytest.raises(CacheRankLostError):
        open_epoch(impatient, served.hello(), 0.2)
    assert started.wait(10)
    impatient.close()
    going_on.set()
    assert served.connect().settle().epoch >= 1
    assert served.pairs.empty()  # nobody was met but the one that is there
    assert served.counters.epochs_total == 1
    assert not list(served.run_dir.path.glob("store-*"))


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (UnsupportedModelError("no q_proj of layer 3"), "model"),
        (torch.OutOfMemoryError("no q_proj of layer 3"), "cache_rank"),
    ],
)
def test_an_epoch_that_cannot_be_built_is_refused_with_the_reason(serve, monkeypatch, error, field):
    served = serve()

    def broken(model):
        raise error

    monkeypatch.setattr(served.service._resources, "predictor", broken)
    with pytest.raises(HandshakeRefusedError, match="no q_proj of layer 3") as caught:
        served.connect()
    assert caught.value.field == field
    assert served.counters.refused_total == 1
    monkeypatch.undo()
    assert served.connect().settle().epoch >= 1


def test_only_who_opened_the_epoch_may_speak_in_it(serve):
    served = serve()
    rank = served.connect()
    request = rank.new_request(1, 20)
    rank.extend(request)
    stranger = ControlClient(served.run_dir)
    for message in (
        ClearSlots(epoch=1),
        ReleaseRow(epoch=1, row=1, generation=1),
        FreeSlots(epoch=1, num_slots=5),  # would take the next step's data for slot ids
        Goodbye(epoch=1),
    ):
        stranger.send(message)
    stranger.request(StatusRequest(), 10.0)
    stranger.close()
    for _ in range(3):
        rank.decode(request)
    assert rank.settle().epoch == 1
    assert (served.counters.rows_live, served.counters.slots_live) == (1, 23)
    assert served.counters.stale_reads_total == 0


def test_an_index_that_the_store_does_not_have_is_refused(serve, settings_of):
    with pytest.raises(SettingsError, match="index_dtype=int4"):
        serve(settings_of(index_dtype="int4"))
