# SPDX-License-Identifier: Apache-2.0
"""Cache ranks beside a benchmark that is the inference rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from shared_forward import Forward
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.step_trace import traced_beside
from tandemkv.server.evaluation.bench.configurations import BUILT_IN, Configuration
from tandemkv.server.evaluation.bench.decode import cache_rank_beside
from tandemkv.server.settings.launch_settings import ServeSettings


def settings_of(model_dir: Path, batch: int = 2, **more: Any) -> ServeSettings:
    given = {"device": "cpu", "transport": "shared", "selection.index_dtype": "int8"}
    configuration = Configuration(settings=given | more)
    return configuration.serve_settings(model_dir=model_dir, capacity_tokens=4096, batch=batch)


@pytest.mark.parametrize("count", [1, 2])
def test_all_cache_ranks_answer(count: int, tmp_path: Path) -> None:
    """Of three KV heads one of two has two, and the other one."""
    heads = {"num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 8}
    model_dir = write_model(tmp_path / "model", CONFIG | heads)
    run_dir = RunDir.create(tmp_path / "run")
    with cache_rank_beside(settings_of(model_dir, cache_ranks=count), run_dir, tmp_path):
        found = [request_status(run_dir.of_rank(n).heartbeat_socket, 5.0) for n in range(count)]
        assert len({status.info["pid"] for status in found}) == count
        assert {status.info["cache_ranks"] for status in found} == {str(count)}
    logs = sorted(path.name for path in tmp_path.glob("*.log"))
    assert logs == (["cache_rank.log"] if count == 1 else ["cache_rank_0.log", "cache_rank_1.log"])


def test_by_messages_each_has_a_pump_that_answers(tmp_path: Path) -> None:
    heads = {"num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 8}
    model_dir = write_model(tmp_path / "model", CONFIG | heads)
    run_dir = RunDir.create(tmp_path / "run")
    settings = settings_of(model_dir, cache_ranks=2, transport="message")
    with cache_rank_beside(settings, run_dir, tmp_path):
        found = [request_status(run_dir.of_rank(n).heartbeat_socket, 5.0) for n in range(2)]
        assert [status.role for status in found] == ["pump", "pump"]
        assert len({status.info["address"] for status in found}) == 2
    logs = {path.name for path in tmp_path.glob("*.log")}
    assert {"cache_rank.log", "cache_rank_1.log"} <= logs, "a pump that meets nobody says nothing"


@pytest.mark.parametrize("is_asked", [True, False])
def test_each_traces_the_steps_that_the_benchmark_asks_for(is_asked: bool, tmp_path: Path) -> None:
    model_dir, traces = write_model(tmp_path / "model"), tmp_path / "traces"
    run_dir = RunDir.create(tmp_path / "run")
    small = {"budget_tokens": 16, "num_recent_tokens": 8, "policy": "oracle"}
    given = {f"selection.{key}": value for key, value in small.items()}
    settings = settings_of(model_dir, batch=3, cache_ranks=2, **given)
    holder = DescriptorHolder(run_dir.holder_socket, run_dir.token)
    with cache_rank_beside(settings, run_dir, tmp_path, traces if is_asked else None):
        played = Forward(run_dir, model_dir, settings.rank_settings)
        played.begin()
        played.decode(1)
        with traced_beside(traces, "decode_3x128", 2 if is_asked else 0):
            played.decode(2)
            played.decode(3)
        played.decode(4)
        played.connection.close()
        played.kept.close()
    holder.close()
    found = sorted(traces.glob("*"))
    wanted = [f"decode_3x128_engine{number}.json.gz" for number in range(2)]
    assert [path.name for path in found] == (wanted if is_asked else [])
    for path in found:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert "cpu_op" in {event.get("cat") for event in events}


def test_what_is_not_measured_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, cache_ranks=2, tensor_parallel=2)
    run_dir = RunDir.create(tmp_path / "run")
    with (
        pytest.raises(SettingsError, match="2 engines are not measured here"),
        cache_rank_beside(settings, run_dir, tmp_path),
    ):
        pass


@pytest.mark.parametrize("link", ["shared", "message"])
def test_three_cache_gpus_are_built_in(link: str, tmp_path: Path) -> None:
    """As served, with queries that jump: signs of a head do not depend on the cache ranks."""
    settings = BUILT_IN[f"1+3-{link}-served"].serve_settings(
        model_dir=tmp_path, capacity_tokens=1 << 20, batch=36
    )
    placement = settings.rank_settings.placement
    assert (placement.head_shards, placement.two_gpus, placement.model_device) == (3, True, "cuda")
    assert placement.link == link
    assert settings.stress_selection
    assert settings.selection.num_late == 1
    assert BUILT_IN["dense-tp4"].is_reference
