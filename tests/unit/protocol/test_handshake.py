# SPDX-License-Identifier: Apache-2.0
"""The handshake names what differs, at once, and gives nothing away."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ValidationError

from tandemkv.cache_rank.protocol.control import ControlClient, ControlServer
from tandemkv.cache_rank.protocol.errors import (
    CacheRankLostError,
    HandshakeRefusedError,
    ProtocolError,
)
from tandemkv.cache_rank.protocol.handshake import check_hello, open_epoch
from tandemkv.cache_rank.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Refused,
    Welcome,
    decode,
    encode,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.exchange_settings import (
    CacheSettings,
    ExchangeSettings,
)
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)

TOKEN = bytes(range(32))
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=4,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=128,
    max_context=4096,
    dtype="float32",
    model_hash="ab" * 16,
)
SETTINGS = RankSettings()
WELCOME = Welcome(epoch=3, num_slots=9)


def _hello(**changes: object) -> Hello:
    hello = Hello(
        protocol_version=PROTOCOL_VERSION, token=TOKEN, model=MODEL, settings=SETTINGS.flat(),
        max_rows=8, page_size=1,
    )  # fmt: skip
    return msgspec.structs.replace(hello, **changes)


def _check(hello: Hello) -> Refused | None:
    return check_hello(hello, token=TOKEN, model=MODEL, settings=SETTINGS)


def test_equal_sides_agree() -> None:
    assert _check(_hello()) is None


@pytest.mark.parametrize("field", ModelSpec.__struct_fields__)
def test_each_model_field_is_named(field: str) -> None:
    old = getattr(MODEL, field)
    more: dict[type, Any] = {int: 1, str: "x", tuple: (1,)}
    new = 0.5 if old is None else old + more[type(old)]
    refused = _check(_hello(model=msgspec.structs.replace(MODEL, **{field: new})))
    assert refused is not None
    assert refused.field == field
    assert str(old) in refused.message
    assert str(new) in refused.message


@pytest.mark.parametrize("field", sorted(SETTINGS.flat()))
def test_each_setting_is_named(field: str) -> None:
    flat = SETTINGS.flat()
    for changed in ({**flat, field: "other"}, {k: v for k, v in flat.items() if k != field}):
        refused = _check(_hello(settings=changed))
        assert refused is not None
        assert refused.field == field
        assert changed.get(field, "no such field") in refused.message
        assert flat[field] in refused.message


def test_setting_that_the_cache_rank_lacks_is_named() -> None:
    refused = _check(_hello(settings={**SETTINGS.flat(), "selection.novel": "1"}))
    assert refused is not None
    assert refused.field == "selection.novel"


def test_settings_trees_that_differ_are_refused() -> None:
    for other in (
        RankSettings(selection=SelectionSettings(budget_tokens=512)),
        RankSettings(exchange=ExchangeSettings(heartbeat_misses=2)),
        RankSettings(cache=CacheSettings(capacity_tokens=1024)),
        RankSettings(evaluation=True),
    ):
        assert _check(_hello(settings=other.flat())) is not None


def test_order_is_version_token_rest() -> None:
    other = msgspec.structs.replace(MODEL, dtype="bfloat16")
    refused = _check(_hello(protocol_version=PROTOCOL_VERSION + 1, token=b"x" * 32, model=other))
    assert refused is not None
    assert refused.field == "protocol_version"
    refused = _check(_hello(token=b"x" * 32, model=other))
    assert refused is not None
    assert refused.field == "token"
    assert "dtype" not in refused.message


@pytest.mark.parametrize("token", [b"", b"\xff" * 32, TOKEN[:-1], TOKEN + b"x"])
def test_wrong_token_is_refused_and_none_is_told(token: bytes) -> None:
    refused = _check(_hello(token=token))
    assert refused is not None
    assert refused.field == "token"
    for secret in (TOKEN, token):
        if secret:
            assert repr(secret)[2:-1] not in refused.message
            assert secret.hex() not in refused.message


def test_refusal_fits_its_bounds_whatever_the_peer_sends() -> None:
    flat = {**SETTINGS.flat(), "selection.policy": "p" * 4096}
    refused = _check(_hello(settings=flat))
    assert refused is not None
    assert decode(msgspec.msgpack.encode(refused)) == refused


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def _serve_once(run_dir: RunDir, answer: Callable[[Message], Message]) -> ControlServer:
    server = ControlServer(run_dir)

    def serve() -> None:
        received = server.poll(5.0)
        if received is not None:
            server.send(received[0], answer(received[1]))

    threading.Thread(target=serve, daemon=True).start()
    return server


def _open(run_dir: RunDir, hello: Hello, timeout_s: float = 5.0) -> Welcome:
    client = ControlClient(run_dir)
    try:
        return open_epoch(client, hello, timeout_s)
    finally:
        client.close()


def test_settings_with_long_lists_are_compared() -> None:
    """As many values of a policy's option as settings may have, each of 64 bits."""
    values = tuple(range(-(1 << 63), 1024 - (1 << 63)))
    selection = SelectionSettings(options={"layers": values})
    hello = decode(encode(_hello(settings=RankSettings(selection=selection).flat())))
    assert isinstance(hello, Hello)
    assert hello.settings["selection.options.layers"] == str(list(values))
    with pytest.raises(ValidationError, match=r"options.wide is too long: with its \d+ bytes"):
        SelectionSettings(options={"layers": values, "wide": ("x" * 50,) * 1024})


def test_open_epoch(run_dir: RunDir) -> None:
    server = _serve_once(run_dir, lambda message: WELCOME)
    assert _open(run_dir, _hello()) == WELCOME
    server.close()


def test_refusal_reaches_the_inference_rank_within_a_second(run_dir: RunDir) -> None:
    def answer(message: Message) -> Message:
        assert isinstance(message, Hello)
        return _check(message) or WELCOME

    server = _serve_once(run_dir, answer)
    start = time.monotonic()
    with pytest.raises(HandshakeRefusedError, match="field=dtype") as caught:
        _open(run_dir, _hello(model=msgspec.structs.replace(MODEL, dtype="bfloat16")))
    assert time.monotonic() - start < 1.0
    assert caught.value.field == "dtype"
    server.close()


def test_silent_cache_rank_is_a_loss_that_names_the_command(run_dir: RunDir) -> None:
    start = time.monotonic()
    with pytest.raises(CacheRankLostError, match="tandemkv cache-rank"):
        _open(run_dir, _hello(), timeout_s=0.2)
    assert time.monotonic() - start < 1.0


_ASKED = """
import os, sys, time
from pathlib import Path
from tandemkv.cache_rank.protocol.control import ControlServer
from tandemkv.cache_rank.protocol.messages import HeartbeatReply, Refused
from tandemkv.cache_rank.protocol.run_dir import RunDir
server = ControlServer(RunDir.open(Path(sys.argv[1])))
print("up", flush=True)
peer, _ = server.poll(30.0)
if "still there" in sys.argv:
    server.send(peer, HeartbeatReply(epoch=0, sequence=0, busy_s=0.0))
if "refuses" in sys.argv:
    server.send(peer, Refused(field="dtype", message="they differ"))
time.sleep(0.1)
os._exit(9)
"""


@pytest.fixture
def asked(run_dir: RunDir, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A cache rank that ends with a Hello in hand."""
    does = getattr(request, "param", "")
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _ASKED, str(run_dir.path), does], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.mark.parametrize("asked", ["", "still there"], indirect=True)
def test_who_ends_with_a_hello_in_hand_is_not_waited_for(
    run_dir: RunDir, asked: subprocess.Popen[bytes]
) -> None:
    """The next one is asked at once; what the first was told never comes to it."""
    successor: list[ControlServer] = []

    def take_over() -> None:
        asked.wait()
        successor.append(_serve_once(run_dir, lambda message: WELCOME))

    thread = threading.Thread(target=take_over)
    thread.start()
    start = time.monotonic()
    with pytest.raises(CacheRankLostError, match="that was asked has ended"):
        _open(run_dir, _hello(), timeout_s=30.0)
    assert _open(run_dir, _hello()) == WELCOME
    assert time.monotonic() - start < 2.0
    thread.join()
    successor[0].close()


@pytest.mark.parametrize("asked", ["refuses"], indirect=True)
def test_the_last_word_of_who_ends_counts(run_dir: RunDir, asked: subprocess.Popen[bytes]) -> None:
    with pytest.raises(HandshakeRefusedError, match="they differ"):
        _open(run_dir, _hello(), timeout_s=30.0)


def test_a_hello_waits_for_a_cache_rank_that_starts(run_dir: RunDir) -> None:
    servers: list[ControlServer] = []
    timer = threading.Timer(
        0.5, lambda: servers.append(_serve_once(run_dir, lambda message: WELCOME))
    )
    timer.start()
    assert _open(run_dir, _hello()) == WELCOME
    timer.join()
    servers[0].close()


def test_odd_answer_is_a_protocol_error(run_dir: RunDir) -> None:
    server = _serve_once(run_dir, lambda message: _hello())
    with pytest.raises(ProtocolError, match="answered with Hello"):
        _open(run_dir, _hello())
    server.close()


def test_hello_of_another_version_is_refused_though_it_does_not_decode(run_dir: RunDir) -> None:
    with (
        closing(ControlServer(run_dir)) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{run_dir.control_socket}")
        socket.send(msgspec.msgpack.encode([1, 1 << 20, "a later layout"]))
        assert server.poll(0.3) is None
        assert socket.poll(2000)
        refused = decode(socket.recv())
        assert isinstance(refused, Refused)
        assert refused.field == "protocol_version"
        assert server.malformed == 1


def test_ranks_that_split_the_heads_otherwise_are_refused() -> None:
    """Two tensor-parallel ranks, or two cache ranks of one: as many heads, and not the same."""
    tensor_parallel, sharded = (
        RankSettings(placement=Placement.model_validate({"link": "message", **given}))
        for given in ({"tp_size": 2}, {"head_shards": 2})
    )
    refused = check_hello(
        _hello(settings=tensor_parallel.flat()), token=TOKEN, model=MODEL, settings=sharded
    )
    assert refused is not None
    assert refused.field == "placement.tp_size"
    assert "inference rank has placement.tp_size=2, cache rank has 1" in refused.message
