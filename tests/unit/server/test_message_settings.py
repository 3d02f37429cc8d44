# SPDX-License-Identifier: Apache-2.0
"""What link ``message`` refuses before anything is started."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text
from tiny_model import write_model
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, SettingsError
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.message.keys import make_keys
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.checks.preflight import resolve_launch
from tandemkv.server.cli.commands import app
from tandemkv.server.launch import message_launch
from tandemkv.server.launch.cache_rank_launch import clean_run_dir
from tandemkv.server.launch.launcher import LaunchPlan
from tandemkv.server.launch.liveness import Pulse
from tandemkv.server.launch.message_launch import message_launches, with_own_link
from tandemkv.server.launch.run_dir_lock import lock_run_dir
from tandemkv.server.launch.serve import make_plan
from tandemkv.server.settings.launch_settings import ServeSettings

_ADDRESS = "tcp://127.0.0.1:7400"
_MANY = ",".join(f"tcp://10.0.0.1:{port}" for port in range(7400, 7465))
_TWO = f"{_ADDRESS}, tcp://cache-rank-1:7400"


def _settings(**given: Any) -> ServeSettings:
    return ServeSettings.model_validate({"model": "smollm2", **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"transport": "message", "tensor_parallel": 2, "cache_ranks": 3}, "--cache-ranks 2,"),
        ({"transport": "message", "evaluation": True}, "--transport shared"),
        ({"transport": "message", "cache_ranks": 0}, "transport=message and cache_ranks=0 contra"),
        ({"transport": "shared", "cache_ranks": 0}, "transport=shared and cache_ranks=0 contradi"),
        ({"cache_rank_address": _ADDRESS}, "add --link-keys"),
        ({"cache_rank_address": "127.0.0.1:1", "link_keys": "k"}, "tcp://HOST:PORT"),
        ({"cache_rank_address": "tcp://0.0.0.0:1", "link_keys": "k"}, "every interface"),
        ({"cache_rank_address": _ADDRESS, "link_keys": "k", "cache_ranks": 0}, "leave"),
        ({"cache_rank_address": _ADDRESS, "link_keys": "k", "transport": "shared"}, "leave"),
        ({"cache_rank_address": _TWO, "link_keys": "k", "cache_ranks": 3}, "leave"),
        ({"cache_rank_address": _TWO, "link_keys": "k", "tensor_parallel": 3}, "--tp 2"),
        ({"cache_rank_address": f"{_ADDRESS},", "link_keys": "k"}, "tcp://HOST:PORT"),
        ({"cache_rank_address": f"{_ADDRESS},{_ADDRESS}", "link_keys": "k"}, "each .* once"),
        ({"cache_rank_address": _MANY, "link_keys": "k"}, "64 at most"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, SettingsError), match=said):
        _settings(**given)


def test_an_address_means_the_link() -> None:
    found = _settings(cache_rank_address=_ADDRESS, link_keys="k")
    placement = found.rank_settings.placement
    assert (placement.link, placement.num_cache_ranks) == ("message", 1)
    assert placement.has_far_pool
    assert placement.has_far_host
    assert "in a process of its own, met by messages; " in placement.describe()


def _resolved(tmp_path: Path, **given: Any) -> str:
    """Return the placement of a launch here."""
    model_dir = write_model(tmp_path / "model")
    settings = _settings(model=str(model_dir), device="cpu", port=0, **given)
    return resolve_launch(settings, lambda _: None).placement.describe()


def test_keys_are_for_an_address(tmp_path: Path) -> None:
    """A launch with both ends makes its own, and the folder would not be looked at."""
    keys = str(tmp_path / "keys")
    for given in ({"transport": "message"}, {"transport": "shared"}, {"cache_ranks": 0}, {}):
        with pytest.raises(
            SettingsError, match=r"link_keys=.*keys goes with .* Leave --link-keys out"
        ):
            _resolved(tmp_path, link_keys=keys, **given)
    _resolved(tmp_path, link_keys=keys, cache_rank_address=_ADDRESS)


def test_the_placement_says_which_host_it_is(tmp_path: Path) -> None:
    here = _resolved(tmp_path, transport="message")
    said = "met by messages; --transport message was given, for cache ranks on this host"
    assert here.endswith(said)
    far = _resolved(tmp_path, cache_rank_address=_ADDRESS, link_keys="keys")
    assert far.endswith(f"met by messages; --cache-rank-address {_ADDRESS} was given")
    assert "another host" not in here + far


@pytest.mark.parametrize(("tp_size", "num_shards"), [(1, 2), (2, 1)])
def test_each_address_is_a_cache_rank(tp_size: int, num_shards: int) -> None:
    found = _settings(cache_rank_address=_TWO, link_keys="k", tensor_parallel=tp_size)
    assert found.cache_rank_addresses == (_ADDRESS, "tcp://cache-rank-1:7400")
    placement = found.rank_settings.placement
    assert (placement.num_cache_ranks, placement.head_shards) == (2, num_shards)
    assert placement.num_sharing == 1


def test_the_other_host_may_have_a_name() -> None:
    found = _settings(cache_rank_address="tcp://tandemkv-cache-rank:7400", link_keys="k")
    assert found.wished_link == "message"


def test_addresses_that_may_come_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        message_launch, "run_far_rank", lambda *given, verbose: found.append((*given, verbose))
    )
    words = ["cache-rank", "--model", "smollm2", "--run-dir", str(tmp_path), "--address", _ADDRESS]
    for more in ([], ["--allow", "10.0.0.1, 0:0::3,", "--rank", "1", "--verbose"]):
        assert CliRunner().invoke(app, [*words, *more]).exit_code == 0
    assert [(*given[2:4], *given[5:]) for given in found] == [
        (_ADDRESS, [], 0, False),
        (_ADDRESS, ["10.0.0.1", "::3"], 1, True),
    ]
    refused = CliRunner().invoke(app, [*words, "--allow", "node-1"])
    assert refused.exit_code == 2
    assert "--allow node-1: no IP address" in refused.stderr
    assert len(found) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pump_that_ends_says_so_and_leaves_the_logs(tmp_path: Path) -> None:
    """The K/V are gone with it, and exit code 0 would tell nobody."""

    class Pump:
        def run(self, _stop: object) -> None:
            raise ValueError("a descriptor too few")

    run_dir = RunDir.create(tmp_path / "run")
    (run_dir.path / "cache_rank.log").write_text("why")
    pump: Any = Pump()
    thread = message_launch.PumpThread(pump, run_dir)
    with thread.serving():
        thread.join()
    assert "a descriptor too few" in str(thread.error)
    clean_run_dir(run_dir, is_ours=True, keep_logs=False)
    assert (run_dir.path / "cache_rank.log").read_text() == "why"


def test_a_cache_rank_of_another_host_has_to_be_told_where_to_listen(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(f"model: smollm2\ncache_rank_address: {_ADDRESS}\nlink_keys: k\n")
    words = ["cache-rank", "--run-dir", str(tmp_path / "run"), "--config", str(config)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2
    assert "add --address" in " ".join(found.output.split())


def _resolves_on_a_cpu(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    def resolve(settings: ServeSettings, *_: Any) -> tuple[ServeSettings, Path]:
        placed = {"placement": settings.placement_on("cpu")}
        return settings.model_copy(update=placed), model_dir

    monkeypatch.setattr(message_launch, "resolve_cache_rank", resolve)


@pytest.mark.parametrize(
    ("rank", "is_taken", "said"),
    [(2, False, "cache ranks 0 to 1"), (1, True, "another cache rank is there")],
)
def test_a_cache_rank_that_cannot_be_that_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, is_taken: bool, said: str
) -> None:
    _resolves_on_a_cpu(monkeypatch, tmp_path)
    if is_taken:
        monkeypatch.setattr(message_launch, "cache_rank_detail", lambda _: None)
    settings = _settings(cache_rank_address=_TWO, link_keys=str(tmp_path / "keys"))
    with pytest.raises(SettingsError, match=said):
        message_launch.run_far_rank(
            settings, tmp_path / "run", "tcp://127.0.0.1:0", (), Console(), rank
        )
    assert not list(tmp_path.iterdir())


def test_a_cache_rank_shows_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets around an address are no markup."""
    _resolves_on_a_cpu(monkeypatch, tmp_path)
    make_keys(tmp_path / "keys")
    door = SimpleNamespace(address="tcp://[fd00::1]:7400")
    monkeypatch.setattr(message_launch, "Door", lambda *_: door)
    monkeypatch.setattr(message_launch, "FarPump", lambda *_: None)
    found: list[LaunchPlan] = []

    def launcher(plan: LaunchPlan, *_: Any, **__: Any) -> SimpleNamespace:
        found.append(plan)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(message_launch, "Launcher", launcher)
    settings = _settings(link_keys=str(tmp_path / "keys"))
    message_launch.run_far_rank(settings, tmp_path / "run", "tcp://[::1]:0", (), Console())
    (plan,) = found
    assert Text.from_markup(plan.banner).plain == "cache rank at tcp://[fd00::1]:7400"


def test_a_cache_rank_that_is_loading_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers there yet; whoever came second would remove its files in the end."""
    monkeypatch.setattr("tandemkv.server.launch.run_dir_lock._LOCK_WAIT_S", 0.3)
    _resolves_on_a_cpu(monkeypatch, tmp_path)
    folder = tmp_path / "run"
    settings = _settings(
        cache_rank_address=_TWO, link_keys=str(tmp_path / "keys"), run_dir=str(folder)
    )
    with lock_run_dir(folder), pytest.raises(SettingsError, match="another launch is there"):
        message_launch.run_far_rank(settings, folder, "tcp://127.0.0.1:0", (), Console())
    assert {path.name for path in folder.iterdir()} == {"token", "launcher.lock"}


def test_both_ends_here_have_keys_and_addresses_of_their_own(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    settings = with_own_link(_settings(transport="message", cache_ranks=2), run_dir)
    assert len(set(settings.cache_rank_addresses)) == 2
    assert all(x.startswith("tcp://127.0.0.1:") for x in settings.cache_rank_addresses)
    launches = message_launches(settings, run_dir, is_far_here=True)
    specs = [launch.spec for launch in launches if launch.spec is not None]
    assert [spec.name for spec in specs] == ["cache rank", "cache rank 1", "pump", "pump 1"]
    for rank, (far, near) in enumerate(zip(specs[:2], specs[2:], strict=True)):
        assert settings.cache_rank_addresses[rank] in far.argv
        assert "pump" in near.argv
        for spec in (far, near):
            assert ("--rank" in spec.argv) is (rank > 0)
    assert len({spec.log_path for spec in specs}) == 4
    first, second = (Path(x.argv[x.argv.index("--run-dir") + 1]) for x in specs[:2])
    RunDir.open(first).clear()  # what the first one does at its end
    assert RunDir.open(second).token, "it is as on another host"
    assert [x.spec for x in message_launches(settings, run_dir, is_far_here=False)] == specs[2:]
    run_dir.clear()
    assert not list((tmp_path / "run").iterdir()), "nothing is left"


def test_who_holds_k_and_v_here_is_asked_itself(tmp_path: Path) -> None:
    """It starts the cache rank, which may be away; it may hang where that one answers."""
    run_dir = RunDir.create(tmp_path / "run")
    settings = with_own_link(_settings(transport="message"), run_dir)
    launch = message_launches(settings, run_dir, is_far_here=True)[0]
    far = RunDir(run_dir.path / "far" / "0")
    reply = StatusReply(role="", epoch=1, ready=True, values={"stalled_s": 3.0}, info={})
    with closing(StatusServer(far.inference_socket, status=lambda: reply)):
        assert launch.pulse(os.getppid()) == Pulse(is_ready=False, stalled_s=3.0)
        with closing(StatusServer(far.heartbeat_socket, status=lambda: reply)):
            assert launch.pulse(os.getppid()) == Pulse(is_ready=True, stalled_s=3.0)
    with (
        closing(StatusServer(far.heartbeat_socket, status=lambda: reply)),
        pytest.raises(CacheRankLostError),
    ):
        launch.pulse(os.getppid())
    run_dir.clear()


def test_the_port_of_the_server_is_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang binds it later, so that it is free when the link's are drawn."""
    model_dir = write_model(tmp_path / "model")
    settings = _settings(model=str(model_dir), device="cpu", port=0, transport="message")
    launch = resolve_launch(settings, lambda _: None)
    drawn = iter((launch.port, 7400))
    monkeypatch.setattr(message_launch, "choose_port", lambda *_: next(drawn))
    run_dir = RunDir.create(tmp_path / "run")
    plan = make_plan(launch, run_dir)
    assert plan.cache_ranks[0].spec is not None
    assert "tcp://127.0.0.1:7400" in plan.cache_ranks[0].spec.argv
    run_dir.clear()


def _on_gpus(run_dir: RunDir, tp_size: int, count: int) -> ServeSettings:
    given = _settings(transport="message", tensor_parallel=tp_size, cache_ranks=count)
    placed = given.model_copy(update={"placement": given.placement_on("cuda")})
    return with_own_link(placed, run_dir)


@pytest.mark.parametrize(("tp_size", "count"), [(1, 3), (2, 2), (2, 4)])
def test_cache_ranks_here_have_the_gpus_behind_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, count: int
) -> None:
    """Each with an address; their pumps see what SGLang sees, and use the model's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run_dir = RunDir.create(tmp_path / "run")
    settings = _on_gpus(run_dir, tp_size, count)
    launches = message_launches(settings, run_dir, is_far_here=True)
    far, near = (
        [x.spec for x in part if x.spec is not None]
        for part in (launches[:count], launches[count:])
    )
    seen = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in far]
    assert seen == [str(tp_size + rank) for rank in range(count)]
    for rank, (there, here) in enumerate(zip(far, near, strict=True)):
        assert settings.cache_rank_addresses[rank] in there.argv
        assert "CUDA_VISIBLE_DEVICES" not in here.env
        number = ["--rank", str(rank)] if rank else []
        for spec in (there, here):
            at = spec.argv.index("--config")
            assert list(spec.argv[at - len(number) : at]) == number
    assert {spec.env["CUDA_MPS_CLIENT_PRIORITY"] for spec in far} == {"1"}
    assert {spec.env["CUDA_MPS_CLIENT_PRIORITY"] for spec in near} == {"0"}
    run_dir.clear()


@pytest.mark.parametrize(
    ("tp_size", "count", "models"), [(1, 3, [0, 0, 0]), (2, 2, [0, 1]), (2, 4, [0, 0, 1, 1])]
)
def test_a_pump_is_on_the_gpu_of_its_inference_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    count: int,
    models: list[int],
) -> None:
    found: list[tuple[int, Homes]] = []

    class Pump:
        def __init__(self, *_: Any, rank: int, homes: Homes) -> None:
            found.append((rank, homes))

        def run(self, stop: threading.Event) -> None:
            assert not stop.is_set()

    run_dir = RunDir.create(tmp_path / "run")
    settings = _on_gpus(run_dir, tp_size, count)
    monkeypatch.setattr(message_launch, "NearPump", Pump)
    monkeypatch.setattr(message_launch, "await_entry", lambda *_: None)
    monkeypatch.setattr(message_launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for rank in range(count):
        message_launch.run_pump(settings, run_dir.of_rank(rank, create=True).path, rank)
    assert [rank for rank, _ in found] == list(range(count))
    for (_, homes), model in zip(found, models, strict=True):
        assert {homes.inference, homes.engine, homes.here} == {torch.device("cuda", model)}
    run_dir.clear()


@pytest.mark.parametrize(("seen", "far"), [(None, "1"), ("5, 3", "3"), ("GPU-a,GPU-b", "GPU-b")])
def test_a_cache_rank_here_sees_a_gpu_that_the_model_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str | None, far: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    run_dir = RunDir.create(tmp_path / "run")
    given = _settings(transport="message", cache_ranks=1)
    placed = given.model_copy(update={"placement": given.placement_on("cuda")})
    launches = message_launches(with_own_link(placed, run_dir), run_dir, is_far_here=True)
    there, here = (x.spec.env.get("CUDA_VISIBLE_DEVICES") for x in launches if x.spec is not None)
    assert (here, there) == (seen, far)
    run_dir.clear()
