"""Checks before anything starts, and the command lines that follow from the settings."""

from __future__ import annotations

import json
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tiny_model import write_model

from tandemkv.cache_rank.calibration import resolve as resolve_module
from tandemkv.cache_rank.calibration.resolve import Resolved
from tandemkv.cache_rank.policies import registry
from tandemkv.cache_rank.policies.base import HeadClusters, LayerShare
from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.model_spec import read_config, read_model_spec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.edge.settings import EdgeSettings
from tandemkv.server.checks import ports, preflight
from tandemkv.server.checks.ports import choose_port, server_url
from tandemkv.server.checks.preflight import ResolvedLaunch, resolve_launch
from tandemkv.server.checks.sglang_features import check_speculation
from tandemkv.server.cli import doctor
from tandemkv.server.launch.serve import make_plan
from tandemkv.server.plan import placement_checks, placement_choice
from tandemkv.server.plan.devices import placed_alone
from tandemkv.server.plan.footprint import Footprint
from tandemkv.server.plan.memory import RANK_BYTES, estimate_memory
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import Sourced, load_settings


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def resolve(
    model_dir: Path, progress: Callable[[str], None] = lambda _: None, **values: object
) -> ResolvedLaunch:
    values = {"port": 0, "device": "cpu", **values}
    return resolve_launch(ServeSettings(model=str(model_dir), **values), progress)


def test_resolves_every_auto(model_dir: Path) -> None:
    launch = resolve(model_dir)
    assert (launch.device, launch.spec.dtype, launch.model_dir) == ("cpu", "float32", model_dir)
    assert launch.port > 0
    assert preflight.resolve_dtype("auto", "cuda", model_dir) == "bfloat16"


def test_a_path_that_sglang_takes_for_a_pattern_is_refused(tmp_path: Path) -> None:
    """It would say that there are no weights; nor does a link help, which is followed."""
    model_dir = write_model(tmp_path / "tiny[1]")
    (tmp_path / "link").symlink_to(model_dir)
    for path in (model_dir, tmp_path / "link"):
        with pytest.raises(SettingsError, match=r"for a pattern.*tiny\[1\]; rename"):
            resolve(path)


def test_on_a_cpu_every_policy_runs_in_the_process(model_dir: Path) -> None:
    """On a GPU those do that do not attend themselves."""
    for policy in ("look_ahead", "lfps", "quest", "sfi", "own_policy:NewestFirst"):
        settings = ServeSettings(
            model=str(model_dir), cache_ranks=0, selection={"policy": policy, "exact_layers": []}
        )
        preflight.check_runs_on(settings, "cpu")
        if policy != "lfps":
            preflight.check_runs_on(settings, "cuda")
            continue
        with pytest.raises(SettingsError, match=r"lfps.*use --cache-ranks 1, or --device cpu"):
            preflight.check_runs_on(settings, "cuda")


@pytest.mark.parametrize(("tp_size", "divides"), [(1, True), (2, True), (4, True), (3, False)])
def test_gpus_have_to_divide_the_heads(model_dir: Path, tp_size: int, divides: bool) -> None:
    """8 query heads and 2 KV heads; with more GPUs than KV heads several have the same one."""
    settings = ServeSettings(model=str(model_dir), cache_ranks=0, tensor_parallel=tp_size)
    spec = read_model_spec(model_dir, dtype="float32")
    config = read_config(model_dir)
    if divides:
        preflight.check_model(settings, spec, config)
        return
    with pytest.raises(SettingsError, match="does not divide the 8 query and 2 KV heads"):
        preflight.check_model(settings, spec, config)


def test_refuses_models_that_cannot_be_served(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="DeepseekV3ForCausalLM is not supported"):
        resolve(model_dir)


def test_refuses_layers_and_contexts_that_the_model_lacks(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"exact_layers=\[4\].*layers 0 to 3"):
        resolve(model_dir, selection={"exact_layers": (0, 4)})
    with pytest.raises(SettingsError, match="longer than the 2048 tokens"):
        resolve(model_dir, max_context=4096)
    with pytest.raises(SettingsError, match="longer than the 2048 tokens"):
        resolve(model_dir, max_context=70000)  # and than the cache, which is not to be made larger


def test_the_cache_holds_the_longest_request(model_dir: Path) -> None:
    given = {"max_context": 2048, "cache": {"capacity_tokens": 1024}}
    refusal = r"capacity_tokens=1024 .* of max_context=2048; raise --cache-tokens or lower --max-"
    with pytest.raises(SettingsError, match=refusal):
        resolve(model_dir, **given)
    settings = ServeSettings(model=str(model_dir), **given)
    with pytest.raises(SettingsError, match=refusal):
        preflight.resolve_cache_rank(settings, "cpu", lambda _: None)


def test_refuses_a_capacity_beyond_memory_with_the_numbers(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 4 << 30)
    resolve(model_dir)
    # 2 (K, V) x 4 layers x 2 heads x 8 x 4 bytes = 512 bytes a token: 2^23 tokens are 4 GiB.
    with pytest.raises(SettingsError) as caught:
        resolve(model_dir, cache={"capacity_tokens": 1 << 23})
    assert "kv 4.00" in str(caught.value)
    assert "available 4.00 GiB; --cache-tokens 20" in str(caught.value)


def test_refuses_unknown_policies() -> None:
    load_settings({"model": Sourced("x", "MODEL")}, {})
    with pytest.raises(SettingsError, match="async_spade"):
        load_settings(
            {"model": Sourced("x", "MODEL"), "selection.policy": Sourced("magic", "--policy")}, {}
        )


def test_refuses_kv_that_a_policy_cannot_read(model_dir: Path) -> None:
    """On a GPU a float16 checkpoint has them without a flag, and only long requests read them."""
    lfps = {"selection": {"policy": "lfps"}}
    said = r"policy=lfps reads K and V in float32 or bfloat16, .* float16; use --dtype bfloat16"
    with pytest.raises(SettingsError, match=said):
        resolve(model_dir, dtype="float16", **lfps)
    resolve(model_dir, dtype="bfloat16", **lfps)
    resolve(model_dir, dtype="float16")
    config = read_config(model_dir) | {"torch_dtype": "float16"}
    (model_dir / "config.json").write_text(json.dumps(config))
    settings = ServeSettings(model=str(model_dir), **lfps)
    with pytest.raises(SettingsError, match=said):
        preflight.resolve_cache_rank(settings, "cuda", lambda _: None)


def test_refuses_what_has_no_calibration(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match="tandemkv calibrate MODEL --policy sync_kv"):
        resolve(model_dir, selection={"policy": "sync_kv"})
    with pytest.raises(SettingsError, match=r"calibration=nothing\.json: cannot be read"):
        resolve(model_dir, selection={"policy": "kascade", "calibration": "nothing.json"})
    resolve(model_dir, selection={"policy": "kascade", "anchors": (0, 2)})
    fraction = {"policy": "kascade", "anchors": (0, 2), "options": {"fraction": 0.1}}
    resolve(model_dir, cache_ranks=0, selection=fraction)
    with pytest.raises(SettingsError, match=r"pool_before=1, .*policy=quest .* last_query"):
        resolve(model_dir, selection={"policy": "quest", "pool_before": 1})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"calibration": "k.json"},
            r"calibration=k\.json: policy=look_ahead reads no .* drop --cal",
        ),
        (
            {"anchors": (0, 2)},
            "anchors=0,2: policy=look_ahead has no anchor layers without --share",
        ),
        ({"policy": "exact", "fetch_cap": 8}, "fetch_cap=8: policy=exact fetches nothing"),
        ({"policy": "streaming", "fetch_cap": 8}, "policy=streaming fetches nothing"),
        (
            {"policy": "exact", "refresh_every": 2},
            "policy=exact selects nothing; drop --refresh-ev",
        ),
        *(
            (
                {"policy": policy, "refresh_every": 8},
                rf"refresh_every=8: policy={policy} selects in",
            )
            for policy in ("sfi", "sync_kv")
        ),
        *(
            ({"policy": policy, "pooling": "max_logit"}, f"policy={policy} scores nothing")
            for policy in ("exact", "streaming")
        ),
        *(
            (
                {"policy": policy, "share_layers": True, "anchors": (0, 2)},
                f"share_layers=True: policy={policy} has no selections that layers could share",
            )
            for policy in ("exact", "streaming")
        ),
        ({"policy": "lfps", "pooling": "max_logit"}, "policy=lfps always takes the mean"),
        *(
            ({"policy": policy, "resident_factor": 4.0}, rf"resident_factor=4\.0: policy={policy} ")
            for policy in ("exact", "streaming", "lfps")
        ),
        *(
            ({"policy": policy, "seed_window": 1}, rf"seed_window=1: policy={policy} seeds nothing")
            for policy in ("exact", "streaming")
        ),
        *(
            ({"policy": policy, "index_dtype": "int8"}, f"policy={policy} scans no index of keys")
            for policy in ("exact", "streaming", "quest", "lfps")
        ),
        ({"policy": "sfi", "options": {"window": 128}}, r"sfi\.window=128: .* raise --seed-window"),
        ({"policy": "sfi", "pooling": "max_logit"}, "policy=sfi needs distributions"),
        ({"policy": "lfps", "options": {"rows": 65}}, r"lfps\.rows=65: .* raise --seed-window"),
    ],
    ids=str,
)
def test_refuses_what_a_policy_never_reads_or_cannot_do(
    model_dir: Path, given: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve(model_dir, selection=given)


def test_what_a_policy_reads_or_says_anyway_is_taken(model_dir: Path) -> None:
    layers = {"share_layers": True, "anchors": (2,)}
    for given in (
        {"fetch_cap": 8, "index_dtype": "int8", "refresh_every": 2},
        layers | {"exact_layers": ()},
        {"policy": "exact", "refresh_every": 1, "index_dtype": "native"},
        {"policy": "sfi", "seed_window": 128, "options": {"window": 128}},
        {"policy": "sfi", "refresh_every": 1, "resident_factor": 2.0},
        {"policy": "lfps", "seed_window": 128, "resident_factor": 1.0, "pooling": "softmax_mean"},
    ):
        resolve(model_dir, selection=given)
    quest = registry.find_policy("quest")
    paged = registry.resolve_selection({"policy": "quest", "index_dtype": "int4"})
    registry.check_read(quest, paged)  # so many tokens has a page on GPUs


def test_sync_kv_shares_over_heads(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = HeadClusters(((0, 0),) * 4, ((0,),) * 4)
    measured = Resolved(clusters=clusters, origin="sync_kv.json")
    monkeypatch.setattr(resolve_module, "resolve_calibration", lambda *_: measured)
    for given in ({"anchors": (0, 2)}, {"share_layers": True}):
        with pytest.raises(SettingsError, match="policy=sync_kv shares selections over heads"):
            resolve(model_dir, selection={"policy": "sync_kv", **given})


def test_clusters_of_heads_do_not_cross_ranks(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = HeadClusters(((0, 0),) * 4, ((0,),) * 4)
    measured = Resolved(clusters=clusters, origin="sync_kv.json")
    monkeypatch.setattr(resolve_module, "resolve_calibration", lambda *_: measured)
    resolve(model_dir, selection={"policy": "sync_kv"})
    monkeypatch.setattr(placement_checks.os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(SettingsError, match=r"tensor_parallel=2: policy=sync_kv .*use --tp 1"):
        resolve(model_dir, selection={"policy": "sync_kv"}, tensor_parallel=2)


def test_head_maps_do_not_cross_gpus(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = LayerShare((0, 0, 2, 2), ((0, 1), (1, 0)) * 2)
    measured = Resolved(share=share, origin="kascade.json")
    monkeypatch.setattr(resolve_module, "resolve_calibration", lambda *_: measured)
    monkeypatch.setattr(placement_choice, "check_without_gpus", lambda _: None)
    parallel = {"tensor_parallel": 2, "cache_ranks": 0}
    with pytest.raises(SettingsError, match=r"kascade\.json lead .* use --anchors 0,2, .* --tp 1"):
        resolve(model_dir, selection={"policy": "kascade"}, **parallel)
    resolve(model_dir, selection={"policy": "kascade", "anchors": (0, 2)}, **parallel)
    resolve(model_dir, selection={"policy": "kascade"}, cache_ranks=0)
    # Where every head follows itself, anchors say all, and each GPU can have them.
    straight = Resolved(share=LayerShare((0, 0, 2, 2), ((0, 1),) * 4), origin="kascade.json")
    monkeypatch.setattr(
        resolve_module,
        "resolve_calibration",
        lambda chosen, *_: Resolved(share=None) if chosen.anchors else straight,
    )
    found = resolve(model_dir, selection={"policy": "kascade"}, **parallel)
    assert found.settings.selection.anchors == (0, 2)


def test_a_taken_port_is_named(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port={port} on 127.0.0.1.*--port 0"):
            resolve(model_dir, port=port)
    assert choose_port("127.0.0.1", port) == port


def test_a_free_port_is_none_of_an_outgoing_connection_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's connection could take such a port in the minute that SGLang needs to bind it."""
    file = tmp_path / "range"
    monkeypatch.setattr(ports, "_OUTGOING", file)
    for text, first in (("32768\t60999\n", 32768), ("20100 60999", 20100), ("nonsense", 32768)):
        file.write_text(text)
        assert all(20000 <= choose_port("127.0.0.1", 0) < first for _ in range(20))
    file.write_text("1024 65535")  # nothing is left below
    assert choose_port("127.0.0.1", 0) >= 20000
    monkeypatch.setattr(ports, "why_taken", lambda *_: OSError(98, "in use"))
    with pytest.raises(SettingsError, match=r"none of 64 ports .* --port"):
        choose_port("127.0.0.1", 0)


def test_a_port_is_to_be_free_at_every_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        both = [
            info
            for host in ("::1", "127.0.0.1")
            for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        with pytest.raises(SettingsError, match="Address already in use"):
            choose_port("localhost", port)
        monkeypatch.undo()
        if socket.has_dualstack_ipv6():
            assert choose_port("::", port) == port  # IPv6 alone
    found = [(99, socket.SOCK_STREAM, 6, "", ("::1", 1)), both[1]]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert choose_port("localhost", port) == port  # without IPv6


def test_addresses() -> None:
    assert server_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert server_url("::1", 80) == "http://[::1]:80"
    with pytest.raises(SettingsError, match=r"host=203\.0\.113\.1 is no address"):
        choose_port("203.0.113.1", 0)


def test_variables_of_sglang_that_contradict_us_are_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_GRPC_PORT", "4000")
    with pytest.raises(SettingsError, match=r"SGLANG_GRPC_PORT is set: .*; unset it"):
        resolve(model_dir)


NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")


def test_drafts_of_n_grams_go_with_exact_in_one_process(model_dir: Path) -> None:
    exact = {"policy": "exact"}
    resolve(model_dir, sglang_args=NGRAMS, selection=exact, cache_ranks=0)
    with pytest.raises(SettingsError, match=r"policy=look_ahead: drafts .* use --policy exact"):
        resolve(model_dir, sglang_args=NGRAMS, cache_ranks=0)
    with pytest.raises(SettingsError, match=r"cache_ranks=1: drafts .* use --cache-ranks 0"):
        resolve(model_dir, sglang_args=NGRAMS, selection=exact)
    with pytest.raises(SettingsError, match="with --evaluation, which chooses tokens one at a"):
        resolve(model_dir, sglang_args=NGRAMS, selection=exact, cache_ranks=0, evaluation=True)


def test_drafts_are_not_verified_in_a_window(model_dir: Path) -> None:
    settings = resolve(model_dir, sglang_args=NGRAMS, selection={"policy": "exact"}, cache_ranks=0)
    spec = msgspec.structs.replace(settings.spec, windowed_layers=(1,))
    with pytest.raises(SettingsError, match="layers with a sliding window; drop the argument"):
        check_speculation(settings.settings, spec)
    spec = msgspec.structs.replace(settings.spec, linear_layers=(1,))
    with pytest.raises(SettingsError, match="layers with linear attention; drop the argument"):
        check_speculation(settings.settings, spec)


def test_a_watermark_goes_where_no_pass_is_done_again(model_dir: Path) -> None:
    marked = ("--enable-watermark", "--watermark-config", "mark.json")
    resolve(model_dir, sglang_args=marked, cache_ranks=0)
    with pytest.raises(SettingsError, match=r"--enable-watermark .* use --cache-ranks 0"):
        resolve(model_dir, sglang_args=marked)


def test_key_files_are_read_before_anything_starts(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--api-key-file=.*cannot be read"):
        resolve(model_dir, edge={"api_key_file": tmp_path / "none"})


def test_each_tensor_parallel_rank_takes_memory(model_dir: Path) -> None:
    spec = read_model_spec(model_dir, dtype="float32")

    def needed(tp_size: int) -> Footprint:
        settings = ServeSettings(model=str(model_dir), tensor_parallel=tp_size)
        return estimate_memory(settings, spec, model_dir, device="cpu")

    alone, two, four = needed(1), needed(2), needed(4)
    assert two.total == alone.total + RANK_BYTES
    assert four.kv == 2 * alone.kv  # of two KV heads, each of four ranks has one


def test_the_plan_of_a_cpu_launch(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEMKV_SERVE_PORT", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    said: list[str] = []
    given = {"cache": {"capacity_tokens": 4096}, "sglang_args": ("--log-level", "x")}
    launch = resolve(model_dir, said.append, **given)
    run_dir = RunDir.create(tmp_path / "run")
    plan = make_plan(launch, run_dir)
    line = " ".join(plan.sglang.argv)
    for part in (
        "-P -m sglang.launch_server", f"--model-path {model_dir}", "--attention-backend tandemkv",
        "--host 127.0.0.1", f"--port {launch.port}", "--max-total-tokens 4096", "--page-size 1",
        "--device cpu", "--dtype float32", "--disable-overlap-schedule", "--disable-cuda-graph",
        "--chunked-prefill-size 2048", "--max-running-requests 8", "--enable-metrics",
        "--kv-cache-dtype auto", "--disable-hybrid-swa-memory",
    ):  # fmt: skip
        assert part in line
    assert plan.sglang.argv[-2:] == ("--log-level", "x")
    env = plan.sglang.env
    assert RankSettings.model_validate_json(env["TANDEMKV_SETTINGS"]) == (
        launch.settings.rank_settings
    )
    assert env["TANDEMKV_RUN_DIR"] == str(run_dir.path)
    assert (env["SGLANG_PLUGINS"], env["HF_HUB_OFFLINE"]) == ("tandemkv", "1")
    assert env["TORCHDYNAMO_DISABLE"] == "1"  # penalties would be compiled while requests wait
    assert EdgeSettings.model_validate_json(env["TANDEMKV_EDGE"]) == launch.settings.edge
    (cache_rank,) = plan.cache_ranks
    assert cache_rank.spec is not None
    for child in (plan.sglang, cache_rank.spec):
        assert (child.env["OMP_NUM_THREADS"], child.env["PYTHONSAFEPATH"]) == ("1", "1")
        assert "TANDEMKV_SERVE_PORT" not in child.env
    # The cache rank reads the same tree from the file that is written for it.
    config = Path(cache_rank.spec.argv[-1])
    read_back = load_settings({}, {}, config)
    assert read_back.rank_settings == launch.settings.rank_settings
    assert placed_alone(read_back, "cpu").rank_settings.placement == launch.placement
    shown = "\n".join([*said, plan.banner])
    assert shown.count(launch.placement.describe()) == 1
    assert cache_rank.detail() is not None
    plan.clean_up(True)
    assert not config.exists()
    assert str(launch.port) in plan.banner


def test_doctor_checks_report_instead_of_raising(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> doctor.Finding:
        raise RuntimeError("boom")

    fine = doctor.Finding("x", "ok", "")
    monkeypatch.setattr(doctor, "check_python", broken)
    monkeypatch.setattr(doctor, "check_contract", lambda: fine)
    open_dir = tmp_path / "open"
    open_dir.mkdir(mode=0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = doctor.run_checks(port=taken.getsockname()[1], run_dir=open_dir)
    failed = {item.name: item for item in found if item.level == "fail"}
    assert {"python", "port", "run directory"} <= failed.keys()
    assert "boom" in failed["python"].text
    assert all(item.advice for item in failed.values())


@pytest.mark.parametrize(
    ("version", "level", "says"),
    [
        ("0.5.17", "ok", ""),
        ("0.5.20", "warn", "0.5.20 is taken, and was not run with tandemkv on a CPU"),
        ("0.5.16", "fail", "takes 0.5.17 to 0.5.23; install sglang==0.5.17"),
        (None, "fail", "sglang is not installed; install sglang==0.5.17"),
    ],
)
def test_doctor_says_of_an_sglang_where_it_was_run(
    version: str | None, level: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda _package: version)
    monkeypatch.setattr(doctor, "resolve_device", lambda _device: "cpu")
    found = doctor.check_sglang()
    assert (found.level, found.text) == (level, version or "not installed")
    assert says in found.advice


def test_refuses_an_index_that_takes_long_pages_on_a_cpu(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"index_dtype=int4.*--index-dtype int8"):
        resolve(model_dir, selection={"index_dtype": "int4"})


def test_doctor_maps_memory() -> None:
    assert doctor.check_shared_memory().level == "ok"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        found = doctor.check_shared_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert found.level == "fail"
    assert "cannot be made" in found.text
