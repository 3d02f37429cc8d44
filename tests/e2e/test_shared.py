# SPDX-License-Identifier: Apache-2.0
"""Link ``shared``: the engine in a process of its own, in memory that both ranks map."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from exactness import check_everywhere, flush, run
from mapped_memory import Memory, mapped, scheduler_pid
from rank_servers import SMALL_SELECTION, Server, model_dir, ours

from tandemkv.cache_rank.protocol.models.fitted_queries import fitted_layers, write_fitted_queries
from tandemkv.cache_rank.protocol.models.index_channels import (
    indexed_layers,
    write_index_channels,
)
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.inference_rank.weights.query_checkpoint import QueryCheckpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COVERING = {
    "policy": "look_ahead",
    "budget_tokens": 600,
    "resident_factor": 2.0,
    "num_recent_tokens": 32,
    "dense_while_fits": False,
}
RESIDENT = 4 + 2 * 600


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Everything is selected, nothing skipped: what the engine does decides every token."""
    with ours({"selection": COVERING}) as found:
        yield found


def test_tokens_equal_stock(
    server: Server, prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    check_everywhere(server, prompts, reference, new_tokens=new_tokens)
    inference, cache = server.values()
    assert inference["sparse_rows_total"] > 0
    assert inference["exchange_wait_us_total"] > 0
    assert cache["fetched_rows_total"] > 0
    assert cache["selections_total"] > 0
    assert 0 < cache["announcement_p50_us"] <= cache["announcement_p99_us"]


def test_nothing_between_the_ranks_is_tcp(server: Server) -> None:
    """One listener in all: the HTTP port. Nothing is sent; memory is mapped by both."""
    port = int(server.url.rpartition(":")[2])
    found = set()
    for process in server.processes():
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.port)
    assert found == {port}
    holding = [process.pid for process in server.processes() if "kv" in mapped(process.pid)]
    # The launcher uses none of it: it keeps K/V where a rank ends.
    assert sorted(holding) == sorted([server.pid, scheduler_pid(server), server.cache_rank_pid()])


def test_memory_outlives_the_cache_rank(server: Server, token_ids: list[int]) -> None:
    """K/V, and the engine's own books, are read after it was killed; then its successor goes on."""
    flush(server)
    memory = Memory(server, num_resident=RESIDENT)
    before = memory.snapshot()
    body: dict[str, Any] = {
        "input_ids": token_ids[:700],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    answer = server.generate(**body)["text"]
    (row,) = memory.changed_rows(before)
    slots = memory.table[row, :700]
    keys = memory.pool[:, :, slots].copy()
    assert (keys != 0).any((1, 2, 3, 4)).all()
    kill_cache_rank(server)
    after = Memory(server, num_resident=RESIDENT)  # found by their descriptors, not kept by us
    assert after.mismatches(row) == 0
    assert (after.positions[:, row] >= 0).sum() > 30 * 3 * 600
    assert (after.pool[:, :, slots] == keys).all()
    wait_ready(server)
    assert server.generate(**body)["text"] == answer


def kill_cache_rank(server: Server) -> None:
    """Kill it, and return when nothing of it runs any more."""
    process = psutil.Process(server.cache_rank_pid())
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_ready(server: Server) -> None:
    deadline = time.monotonic() + 60
    while server.get("/tandemkv/ready")[0] != 200:
        assert time.monotonic() < deadline, "the server does not come back"
        time.sleep(0.1)


@pytest.mark.usefixtures("on_deep_model")
def test_fitted_projections_choose_what_is_selected(
    small_asked: list[list[int]], new_tokens: int, of_serve: list[Any], tmp_path: Path
) -> None:
    """They come to the engine's process: with W_q turned round, what is least alike is chosen."""
    spec = read_model_spec(Path(model_dir()), dtype="float32")
    checkpoint, rows = QueryCheckpoint(Path(model_dir())), range(spec.num_qo_heads * spec.head_dim)
    layers = {}
    for layer in fitted_layers(spec):
        own = checkpoint.weight(layer, rows, dtype=torch.float32, device=torch.device("cpu"))
        layers[layer] = -own, torch.zeros(len(rows))
    write_fitted_queries(tmp_path / "turned.safetensors", spec, 1, layers, {})
    options = {"look_ahead": {"predictor": str(tmp_path / "turned.safetensors")}}
    with ours({"selection": SMALL_SELECTION, "policy_options": options}) as turned:
        found = run(turned, small_asked, new_tokens=new_tokens, at_once=1)
    same = [one["ids"] == other["ids"] for one, other in zip(found, of_serve, strict=True)]
    assert same[0]  # it fits the resident set, and is attended to whole
    assert not all(same[1:])


@pytest.mark.usefixtures("on_deep_model")
def test_channels_of_the_index_reach_the_engine(
    small_asked: list[list[int]], new_tokens: int, of_serve: list[Any], tmp_path: Path
) -> None:
    """With the first two of 16 other tokens are chosen; what fits is attended to whole."""
    spec = read_model_spec(Path(model_dir()), dtype="float32")
    first = torch.arange(2).expand(spec.num_kv_heads, -1)
    path = tmp_path / "channels.safetensors"
    write_index_channels(path, spec, dict.fromkeys(indexed_layers(spec), first), {})
    given = {**SMALL_SELECTION, "index_dtype": "int8", "index_channels": str(path)}
    with ours({"selection": given}) as server:
        found = run(server, small_asked, new_tokens=new_tokens, at_once=1)
    same = [one["ids"] == other["ids"] for one, other in zip(found, of_serve, strict=True)]
    assert same[0]
    assert not all(same[1:])
