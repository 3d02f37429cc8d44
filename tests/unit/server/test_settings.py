"""Settings: precedence of the sources, and errors that name key and source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.server.plan.devices import resolve_device
from tandemkv.server.settings.flags import RANK_FLAGS, SERVE_FLAGS
from tandemkv.server.settings.launch_settings import ServeSettings, is_loopback
from tandemkv.server.settings.sources import (
    Sourced,
    load_settings,
    setting_fields,
    to_yaml,
)


def flags(**values: object) -> dict[str, Sourced]:
    given = {"model": Sourced("m", "MODEL")}
    for name, value in values.items():
        given[name.replace("__", ".")] = Sourced(value, f"--{name}")
    return given


def write(path: Path, text: str) -> Path:
    file = path / "serve.yaml"
    file.write_text(text)
    return file


def test_flags_beat_environment_beats_yaml_beats_defaults(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "port: 1\nmax_running_requests: 2\nselection: {budget_tokens: 300, seed_window: 9}\n",
    )
    environ = {
        "TANDEMKV_SERVE_PORT": "11",
        "TANDEMKV_SERVE_SELECTION__BUDGET_TOKENS": "400",
        "PATH": "/bin",
    }
    settings = load_settings(flags(selection__budget_tokens="500"), environ, config)
    assert settings.selection.budget_tokens == 500
    assert settings.port == 11
    assert (settings.max_running_requests, settings.selection.seed_window) == (2, 9)
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0,1", (0, 1)), ("none", ()), ("3", (3,)), ("[2, 5]", (2, 5)), ("[]", ()), ("null", None)],
)
def test_exact_layers_in_yaml(tmp_path: Path, text: str, layers: tuple[int, ...] | None) -> None:
    config = write(tmp_path, f"selection:\n  exact_layers: {text}\n")
    selection = load_settings(flags(), {}, config).selection
    assert selection.exact_layers == layers
    assert selection.exact_layer_ids == (layers or ())


@pytest.mark.parametrize(
    ("chosen", "layers"),
    [
        ({}, ()),
        ({"policy": "oracle"}, ()),
        ({"sample_tokens": 0}, (0, 1)),
        ({"sample_tokens": 64}, (0, 1)),
        ({"share_layers": True, "anchors": (2,)}, (0, 1)),
        ({"budget_tokens": 100}, (0, 1)),  # too few for samples
        ({"policy": "async_spade"}, (0, 1)),
        ({"policy": "async_spade", "sample_tokens": 128}, (0, 1)),
        ({"exact_layers": (0, 1)}, (0, 1)),
        ({"sample_tokens": 0, "exact_layers": ()}, ()),
    ],
)
def test_flat_layers_are_exact_unless_samples_stand_for_them(
    chosen: dict[str, object], layers: tuple[int, ...]
) -> None:
    assert resolve_selection(chosen).exact_layer_ids == layers


def test_text_forms_of_flags() -> None:
    settings = load_settings(
        flags(
            selection__exact_layers="4, 2",
            selection__fetch_cap="none",
            selection__dense_while_fits=False,
            sglang_args="--log-level 'very low'",
            cache__capacity_tokens="64k",
            max_context="4K",
            selection__dense_tokens="2048",
        ),
        {},
    )
    assert settings.cache.capacity_tokens == 65536
    assert (settings.max_context, settings.selection.dense_tokens) == (4096, 2048)
    assert settings.selection.exact_layers == (4, 2)
    assert settings.selection.fetch_cap is None
    assert not settings.selection.dense_while_fits
    assert settings.sglang_args == ("--log-level", "very low")


def test_what_is_printed_is_read_back_the_same(tmp_path: Path) -> None:
    settings = load_settings(
        flags(run_dir="/tmp/x", selection__exact_layers="none", sglang_args=("--a", "b c")), {}
    )
    read = load_settings({}, {}, write(tmp_path, to_yaml(settings)))
    assert read == settings
    # What nobody set is decided by the GPUs that there are, also where the file is read.
    assert "tensor_parallel" not in read.model_fields_set
    settings = load_settings(flags(tensor_parallel=1), {})
    read = load_settings({}, {}, write(tmp_path, to_yaml(settings)))
    assert "tensor_parallel" in read.model_fields_set


def test_what_the_devices_decide_stays_open_when_it_is_printed(tmp_path: Path) -> None:
    """A file that says native keys would be taken for somebody's wish on GPUs."""
    chosen = {"transport": "shared", "selection__index_dtype": "int8"}
    for more in ({}, chosen):
        read = load_settings({}, {}, write(tmp_path, to_yaml(load_settings(flags(**more), {}))))
        assert (read.transport is not None) is bool(more)
        assert ("index_dtype" in read.selection.model_fields_set) is bool(more)
        assert read == load_settings(flags(**more), {})


_OTHER_LINKS = ["transport=peer", "'shared', 'message' or 'local'"]


@pytest.mark.parametrize(
    ("yaml", "environ", "given", "expected"),
    [
        ("prot: 1", {}, {}, ["prot", "serve.yaml", "did you mean port"]),
        ("selection: {budget: 9}", {}, {}, ["selection.budget ", "serve.yaml", "budget_tokens"]),
        ("budget_tokens: 9", {}, {}, ["budget_tokens", "mean selection.budget_tokens"]),
        ("selection: 3", {}, {}, ["selection", "serve.yaml", "group"]),
        ("[1]", {}, {}, ["serve.yaml", "mapping"]),
        ("a: [", {}, {}, ["serve.yaml", "not valid YAML"]),
        (
            "selection:\n  policy: exact\nport: 1\nselection: {seed_window: 9}\n",
            {},
            {},
            ["serve.yaml: selection is given twice", "in line 1 and in line 4; leave one"],
        ),
        ("cache: {kv_dtype: auto, kv_dtype: auto}", {}, {}, ["kv_dtype is given twice"]),
        (
            "selection.policy: exact\nselection: {policy: quest}",
            {},
            {},
            ["serve.yaml: selection.policy is given twice"],
        ),
        ("", {"TANDEMKV_SERVE_POLICY_OPTIONS": "{sfi: {}, sfi: {}}"}, {}, ["sfi is given twice"]),
        ("port: yes", {}, {}, ["port=True", "serve.yaml", "a number is required"]),
        ("max_context: on", {}, {}, ["max_context=True", "a number is required"]),
        ("exchange: {heartbeat_misses: on}", {}, {}, ["heartbeat_misses=True", "a number is req"]),
        ("start_timeout_s: true", {}, {}, ["start_timeout_s=True", "a number is required"]),
        ("selection: {exact_layers: [no, yes]}", {}, {}, ["exact_layers=[False, True]", "a numb"]),
        ("", {"TANDEMKV_SERVE_PROT": "1"}, {}, ["prot", "TANDEMKV_SERVE_PROT"]),
        ("", {"TANDEMKV_SERVE_CACHE__SIZE": "1"}, {}, ["cache.size", "TANDEMKV_SERVE_CACHE__SIZE"]),
        ("port: 70000", {}, {}, ["port=70000", "serve.yaml", "65535"]),
        ("", {"TANDEMKV_SERVE_PORT": "x"}, {}, ["port=x", "TANDEMKV_SERVE_PORT", "integer"]),
        (
            "",
            {},
            {"selection__late_layers": "99"},
            ["late_layers=99", "--selection__", "8"],
        ),
        ("", {}, {"selection__exact_layers": "0,a"}, ["selection.exact_layers=0,a", "integer"]),
        ("", {}, {"selection__budget_tokens": "10"}, ["budget_tokens=10", "= 68", "--selection_"]),
        ("", {}, {"cache_ranks": "1", "transport": "local"}, ["--cache-ranks 0"]),
        (
            "",
            {},
            {"cache_ranks": "2", "tensor_parallel": "3"},
            ["cache_ranks=2", "one has to divide", "use --cache-ranks 3,", "--tp 2"],
        ),
        (
            "",
            {},
            {"cache_ranks": "1", "tensor_parallel": "4", "transport": "message"},
            ["by messages", "cache ranks of its own", "use --cache-ranks 4, or a multiple of it ("],
        ),
        ("transport: peer", {}, {}, ["serve.yaml", *_OTHER_LINKS]),
        (
            "",
            {"TANDEMKV_SERVE_TRANSPORT": "peer"},
            {},
            ["TANDEMKV_SERVE_TRANSPORT", *_OTHER_LINKS],
        ),
        (
            "",
            {},
            {"cache_ranks": "1", "transport": "peer", "tensor_parallel": "2"},
            ["--transport", *_OTHER_LINKS],
        ),
        ("", {}, {"cache_ranks": "-1"}, ["cache_ranks=-1", "--cache"]),
        ("", {}, {"host": "0.0.0.0"}, ["host=0.0.0.0", "--allow-remote", "--host"]),
        ("cache: {capacity_tokens: 64z}", {}, {}, ["'64z' is no number of tokens", "serve.yaml"]),
        ("device: tpu", {}, {}, ["device=tpu", "serve.yaml", "'cuda'"]),
        (
            "",
            {"TANDEMKV_SERVE_RUN_DIR": ""},
            {},
            ["run_dir= (from TANDEMKV_SERVE_R", "a path"],
        ),
        ("edge: {api_key_file: ''}", {}, {}, ["edge.api_key_file=", "serve.yaml", "a path is req"]),
        ("run_dir: ~no-such-user/run", {}, {}, ["run_dir=~no-such-user/run", "without ~"]),
    ],
)
def test_errors_name_key_and_source(
    tmp_path: Path,
    yaml: str,
    environ: dict[str, str],
    given: dict[str, object],
    expected: list[str],
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags(**given), environ, write(tmp_path, yaml))
    for part in expected:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_may_begin_with_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path, "run_dir: ~/run\nedge: {admin_key_file: ~/admin.key}")
    read = load_settings(flags(link_keys="~/keys", edge__api_key_file="none"), {}, file)
    assert (read.run_dir, read.link_keys) == (tmp_path / "run", tmp_path / "keys")
    assert (read.edge.admin_key_file, read.edge.api_key_file) == (tmp_path / "admin.key", None)
    assert RunDir.create("~/run").path == RunDir.open(Path("~/run")).path == tmp_path / "run"
    for use in (RunDir.create, RunDir.open):
        with pytest.raises(SettingsError, match=r"run_dir=~no-such-user/run: .* without ~"):
            use("~no-such-user/run")


def test_a_file_may_leave_the_placement_open(tmp_path: Path) -> None:
    for text in ("none", "null"):
        config = write(tmp_path, f"placement: {text}\n")
        assert load_settings(flags(), {}, config).placement is None
    with pytest.raises(SettingsError, match=r"placement=here \(from .*serve.yaml\)"):
        load_settings(flags(), {}, write(tmp_path, "placement: here\n"))


def test_a_file_may_merge_mappings_and_switch(tmp_path: Path) -> None:
    text = (
        "cache: &base {capacity_tokens: 4096}\nselection: {<<: {seed_window: 9}, seed_window: 8}\n"
        "allow_remote: yes\ncalibrated: off\n"
    )
    settings = load_settings(flags(), {}, write(tmp_path, text))
    assert (settings.selection.seed_window, settings.cache.capacity_tokens) == (8, 4096)
    assert (settings.allow_remote, settings.calibrated) == (True, False)


def test_web_origins_are_what_browsers_send() -> None:
    given = "https://a.example, http://127.0.0.1:8080,app://notes,http://[::1]:3000"
    assert load_settings(flags(edge__cors_origins=given), {}).edge.cors_origins == (
        "https://a.example", "http://127.0.0.1:8080", "app://notes", "http://[::1]:3000",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("*", "every page .*; name the origins"),
        *((text, "is no origin; write scheme://host") for text in (
            "foo", "https://a.com/", "https://A.com", "https://a.com/x", "https://u@a.com", "null",
            "https://a.com,", "https://", "https://a.com:x",
        )),
        ("https://a.com:443", "leave that port out; write https://a.com$"),
        ("http://a.com:80", "leave that port out; write http://a.com$"),
    ],
)  # fmt: skip
def test_web_origins_that_would_match_nothing_are_refused(origin: str, said: str) -> None:
    with pytest.raises(SettingsError, match=rf"cors_origins=.* \(from --edge__.*\): .*{said}"):
        load_settings(flags(edge__cors_origins=f"https://ok.example,{origin}"), {})


def test_two_errors_are_both_reported() -> None:
    with pytest.raises(SettingsError, match=r"port=-1.*; .*max_running_requests=0"):
        load_settings(flags(port="-1", max_running_requests="0"), {})


def test_a_model_is_required() -> None:
    with pytest.raises(SettingsError, match="no model given"):
        load_settings({}, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read"):
        load_settings(flags(), {}, tmp_path / "none.yaml")


def test_remote_hosts_need_permission() -> None:
    assert load_settings(flags(host="0.0.0.0", allow_remote=True), {}).host == "0.0.0.0"
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("::", "10.0.0.1", "my.host")] == [False] * 3


def test_the_shared_tree_is_embedded_whole() -> None:
    settings = ServeSettings(model="m")
    assert settings.rank_settings == RankSettings()
    assert RankSettings.model_fields.keys() <= ServeSettings.model_fields.keys()
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


def test_every_setting_has_a_flag() -> None:
    keys = [flag.key for flag in SERVE_FLAGS]
    assert len(keys) == len(set(keys))
    assert set(keys) == chosen_by_users(setting_fields()) - {"model", "sglang_args"}
    assert {flag.key for flag in RANK_FLAGS} == chosen_by_users(setting_fields(RankSettings))


def chosen_by_users(keys: Iterable[str]) -> set[str]:
    """Without what is entered from the policy's class."""
    return {key for key in keys if not key.startswith("selection.declared.")}


def test_every_default_can_be_given_as_text() -> None:
    """A command line has nothing else."""
    defaults = ServeSettings(model="m")
    for key in chosen_by_users(setting_fields()) - {"model", "sglang_args"}:
        value: object = defaults
        for name in key.split("."):
            value = getattr(value, name)
        if value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        given = flags() | {key: Sourced(text, f"--{key}")}
        found: object = load_settings(given, {})
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key
    found = load_settings(flags(selection__anchors="2, 8"), {})
    assert found.selection.anchors == (2, 8)


def test_cuda_is_refused_in_this_version() -> None:
    with pytest.raises(SettingsError, match="device=cuda"):
        resolve_device("cuda")
    assert resolve_device("auto") == "cpu"


def test_a_standby_is_for_a_cache_rank_of_its_own() -> None:
    with pytest.raises(ValueError, match="leave --standby out"):
        ServeSettings(model="smollm2", standby=True, cache_ranks=0)
    assert ServeSettings(model="smollm2", standby=True).standby


@pytest.mark.parametrize(
    ("tp_size", "given", "engines_per_rank", "head_shards"),
    [(4, None, 1, 1), (4, 1, 4, 1), (4, 2, 2, 1), (4, 4, 1, 1), (4, 8, 1, 2), (1, 3, 1, 3)],
)
def test_cache_ranks_are_shared_by_ranks_or_share_their_heads(
    tp_size: int, given: int | None, engines_per_rank: int, head_shards: int
) -> None:
    settings = ServeSettings(model="smollm2", tensor_parallel=tp_size, cache_ranks=given)
    found = settings.placement_on("cpu")
    assert (found.engines_per_rank, found.head_shards) == (engines_per_rank, head_shards)
    assert found.num_cache_ranks == (given or tp_size)
    assert found.num_engines == tp_size * head_shards
