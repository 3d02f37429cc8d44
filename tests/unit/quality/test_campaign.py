# SPDX-License-Identifier: Apache-2.0
"""What is decided before a server starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality import campaign
from tandemkv.server.evaluation.quality.campaign import Campaign, describe, prepare
from tandemkv.server.evaluation.quality.report import write_campaign
from tandemkv.server.evaluation.quality.request import Request
from tandemkv.server.evaluation.quality.served import (
    AS_SERVED,
    dense_note,
    differences,
    named,
)
from tandemkv.server.models.calibrated import queries_file
from tandemkv.server.plan.placement_choice import resolve_placement
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import Sourced, load_settings, to_yaml

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "max_position_embeddings": 2048,
}


TASK = "niah_single"
Prepare = Callable[..., Campaign]


@pytest.fixture
def prepared(
    tmp_path: Path, corpus: Corpus, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Prepare:
    """Prepare a campaign of one policy on a tiny model; a GPU, if asked for, is pretended."""
    monkeypatch.setattr(campaign, "resolve_device", lambda device: device)
    monkeypatch.setattr(campaign, "load_tokenizer", lambda folder: tokenizer)
    model, text = tmp_path / "model", tmp_path / "text.txt"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    text.write_text(next(iter(corpus.texts.values())))

    def prepare_one(
        device: str,
        *given: str,
        policy: str | None = "look_ahead",
        tasks: Sequence[str] = ("niah_single",),
        bare: bool = False,
        **options: Any,
    ) -> Campaign:
        if device == "cuda":  # what is open is decided by the GPUs that are there
            monkeypatch.setattr(campaign, "resolve_placement", lambda settings, **_: settings)
        request = Request(
            model=str(model),
            policies=policy,
            tasks=",".join(tasks),
            out=tmp_path / "out",
            samples=1,
            corpus=[text],
            device=device,
            dtype="bfloat16" if device == "cuda" else "float32",
            settings=["selection.num_recent_tokens=16", *given] if not bare else list(given),
            **{"budgets": "160", "context_tokens": "700", **options},
        )
        return prepare(request, lambda text: None)

    return prepare_one


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", [], 0),
        ("cuda", ["selection.dense_tokens=640"], 640),
        ("cpu", [], None),
    ],
)
def test_serve_leaves_no_prompt_dense_on_a_gpu(
    device: str, given: list[str], expected: int | None, prepared: Prepare
) -> None:
    """What `serve` fills in for an open `dense_tokens` would be dense measured against dense."""
    found = prepared(device, *given)
    (sparse,) = (c for c in found.configurations if not c.is_dense)
    assert found.settings_of(sparse).selection.dense_tokens == expected


def test_a_policy_that_attends_on_the_host_is_measured_beside_a_gpu(prepared: Prepare) -> None:
    found = prepared("cuda", policy="lfps")
    assert [c.policy for c in found.configurations if not c.is_dense] == ["lfps"]


def test_a_first_turn_outlasts_the_others(prepared: Prepare) -> None:
    """A later turn finds its context cached, though as many first turns again came in between."""
    one, two = prepared("cpu"), prepared("cpu", tasks=("niah_single+turn",))
    longest = max(s.num_tokens for found in two.prompts.samples.values() for s in found)
    assert one.base.cache.capacity_tokens >= 4096
    assert two.base.cache.capacity_tokens >= 2 * two.request.concurrency * longest


def test_as_served_is_what_serve_makes_of_the_same_command(prepared: Prepare) -> None:
    """Nothing is set for it but evaluation; K, c, cap, samples and layers are serve's own."""
    found = prepared("cpu", policy=None, bare=True, as_served=True, no_dense=True)
    (served,) = found.configurations
    assert (served.budget, served.is_open, served.selection) == (AS_SERVED, True, {})
    flags = {"model": Sourced(str(found.model_dir), "MODEL"), "device": Sourced("cpu", "--device")}
    by_serve = resolve_placement(
        load_settings(flags | {"dtype": Sourced("float32", "--dtype")}, {}),
        found.spec,
        found.model_dir,
        device="cpu",
        progress=lambda _: None,
    )
    assert served.resolved == named(by_serve) == found.choice
    defaults = (896, 1.0, 448, 1024, "native", [])
    names = ("budget_tokens", "resident_factor", "fetch_cap", "sample_tokens", "index_dtype")
    assert tuple(served.resolved[name] for name in (*names, "exact_layers")) == defaults
    started = found.settings_of(served)
    assert started.model_dump(exclude={"evaluation"}) == load_settings(
        flags | {"dtype": Sourced("float32", "--dtype")}, {}
    ).model_dump(exclude={"evaluation"})
    assert started.evaluation


def test_only_as_served_takes_up_what_was_calibrated(prepared: Prepare) -> None:
    """Else the same command would measure something else once a file is there."""
    found = prepared("cpu", as_served=True, no_dense=True)
    one, served = found.configurations
    if not served.is_open:
        one, served = served, one
    assert not found.settings_of(one).calibrated
    assert found.settings_of(served).calibrated
    asked = prepared("cpu", "calibrated=true")
    assert all(asked.settings_of(item).calibrated for item in asked.configurations[-1:])


def test_a_result_is_of_what_a_file_held(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared("cpu", policy=None, bare=True, as_served=True, no_dense=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.model_dir.parent / "cache"))
    (served,) = found.configurations
    path, digests = queries_file(found.spec, 1), [found.digest_of(served, "niah_single")]
    path.parent.mkdir(parents=True)
    for text in ("one", "another"):
        path.write_text(text)
        digests.append(found.digest_of(served, "niah_single"))
    assert len(set(digests)) == 3


def test_what_is_compared_with_dense_s_text_is_of_dense_s_settings(prepared: Prepare) -> None:
    """Dense would write another text, and the kept agreement be with the one before."""
    tasks = ("continuation", "niah_single")
    found = [prepared("cpu", tasks=tasks, dense_args=text) for text in ("", "--page-size 2")]
    digests = [{c.digest_of(c.configurations[1], task) for c in found} for task in tasks]
    assert [len(each) for each in digests] == [2, 1]


def test_a_longer_task_beside_it_does_not_have_a_task_measured_again(prepared: Prepare) -> None:
    """There is room for the longest prompt of all, which changes no answer."""
    alone, beside = (prepared("cpu", tasks=tasks) for tasks in ((TASK,), (TASK, "perplexity")))
    assert alone.base.cache.capacity_tokens < beside.base.cache.capacity_tokens
    assert alone.digest_of(alone.configurations[1], TASK) == beside.digest_of(
        beside.configurations[1], TASK
    )


def test_as_served_takes_what_serve_would_take(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEMKV_SERVE_SELECTION__RESIDENT_FACTOR", "3")
    found = prepared(
        "cpu", "selection.budget_tokens=512", policy=None, bare=True, as_served=True, no_dense=True
    )
    assert os.environ["TANDEMKV_SERVE_SELECTION__RESIDENT_FACTOR"] == "3"
    (served,) = found.configurations
    assert (served.resolved["budget_tokens"], served.resolved["resident_factor"]) == (512, 3.0)
    changed = prepared("cpu", policy=None, bare=True, as_served=True, no_dense=True)
    (other,) = changed.configurations
    assert found.digest_of(served, "niah_single") != changed.digest_of(other, "niah_single")
    with pytest.raises(SettingsError, match=r"add --set cache\.capacity_tokens="):
        prepared("cpu", "cache.capacity_tokens=512", policy=None, bare=True, as_served=True)
    with pytest.raises(SettingsError, match="cannot hold one request of max_context=2000;"):
        prepared("cpu", "cache.capacity_tokens=1500", "max_context=2000")


def test_settings_name_anchors_and_files_without_their_folders() -> None:
    def settings(**selection: object) -> dict[str, object]:
        given = {"model": "m", "device": "cpu", "selection": selection}
        return named(ServeSettings.model_validate(given))

    one, other = (settings(policy="kascade", anchors=anchors) for anchors in ([2, 5], [2, 6]))
    assert differences(one, other) == {"anchors": ([2, 5], [2, 6])}
    assert settings(policy="kascade", calibration="/home/me/k.json")["calibration"] == "k.json"
    found = settings(policy="look_ahead", options={"predictor": "/home/me/fit.safetensors"})
    assert found["options"] == {"predictor": "fit.safetensors"}
    assert "anchors" not in found


def test_dense_against_dense_is_told() -> None:
    """`serve` on a GPU may attend to everything for prompts as short as these."""
    told = dense_note({"dense_tokens": 34000}, 32768, 4)
    assert told is not None
    assert "up to 34000 tokens" in told
    assert "--set selection.dense_tokens=0" in told
    assert dense_note({"dense_tokens": 34000}, 34001, 4) is None
    assert dense_note({"dense_tokens": None}, 100, 4) is None


@pytest.mark.parametrize(
    ("together", "concurrency", "told"),
    [
        (35840, 1, "no step of 1 prompts has more: this measures dense against dense"),
        (35840, 4, "steps of up to 1 of these prompts have no more: they are measured dense"),
        (70000, 4, "steps of up to 2 of these prompts"),
        (131072, 4, "this measures dense against dense"),
        (32000, 4, None),
    ],
)
def test_steps_of_few_long_prompts_are_dense_as_well(
    together: int, concurrency: int, told: str | None
) -> None:
    choice = {"dense_tokens": 8448, "dense_batch_tokens": together}
    found = dense_note(choice, 32768, concurrency)
    assert (found is None) if told is None else (told in str(found))


def test_what_a_gpu_decides_stays_open_in_the_file_that_a_server_is_started_with() -> None:
    """A written default would count as given, and a GPU would keep native keys and 64 tokens."""
    text = to_yaml(ServeSettings(model="m"))
    assert "index_dtype" not in text
    assert "num_recent_tokens" not in text
    given = load_settings({
        "model": Sourced("m", "MODEL"), "selection.num_recent_tokens": Sourced(32, "--set"),
    }, {})  # fmt: skip
    assert "num_recent_tokens: 32" in to_yaml(given)


def test_other_campaigns_name_what_differs_from_serve(prepared: Prepare) -> None:
    found = prepared("cpu")
    (sparse,) = (c for c in found.configurations if not c.is_dense)
    changed = differences(sparse.resolved, found.choice)
    assert changed["budget_tokens"] == (140, 896)
    assert changed["sample_tokens"] == (0, 1024)
    assert changed["exact_layers"] == ([0, 1], [])
    assert not {"index_dtype", "kv_dtype"} & set(changed)
    (sparse,) = (
        c for c in prepared("cpu", "cache.kv_dtype=fp8_e4m3").configurations if not c.is_dense
    )
    assert differences(sparse.resolved, found.choice)["kv_dtype"] == ("fp8_e4m3", "auto")


def test_a_grid_is_named_by_what_serve_leaves_of_it(prepared: Prepare, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "points:\n"
        "  - {budget_tokens: [128, 256], fetch_cap: [K/4, K]}\n"
        "  - {budget_tokens: 256, fetch_cap: 64, sample_tokens: 256}\n"
        "streaming: [300]\n"
    )
    found = prepared("cpu", policy=None, bare=True, grid=grid, no_dense=True)
    assert [item.budget for item in found.configurations] == [
        "K 128, c 1, cap 32, 128 samples, native",
        "K 128, c 1, cap 128, 128 samples, native",
        "K 256, c 1, cap 64, 256 samples, native",
        "K 256, c 1, cap 256, 256 samples, native",
        "streaming, 300",
    ]
    settings = found.settings_of(found.configurations[0]).selection
    assert (settings.budget_tokens, settings.fetch_cap, settings.sample_tokens) == (128, 32, None)
    assert found.configurations[0].attended_tokens == 4 + 128 + 64 + 128
    assert found.configurations[4].attended_tokens == 300
    slugs = {item.slug for item in found.configurations}
    assert len(slugs) == 5


def test_several_contexts_share_a_server(prepared: Prepare) -> None:
    found = prepared("cpu", tasks=("niah_single",), context_tokens="512,700")
    assert list(found.prompts.samples) == ["niah_single@512", "niah_single@700"]
    assert found.prompts.tasks["niah_single@512"]["context_tokens"] == 512
    with pytest.raises(SettingsError, match="a share of which context"):
        prepared("cpu", context_tokens="512,700", budgets="20%")
    with pytest.raises(SettingsError, match="at least 256"):
        prepared("cpu", context_tokens="100")


def test_a_budget_is_less_than_the_context_of_each_task(prepared: Prepare) -> None:
    """A task may have a length of its own; dense against dense would be measured."""
    given = {"tasks": ("niah_single@300",), "context_tokens": "700"}
    with pytest.raises(SettingsError, match="budget=400: 400 tokens of a context of 300"):
        prepared("cpu", budgets="400", **given)
    found = prepared("cpu", budgets="50%", **given)
    assert [c.attended_tokens for c in found.configurations if not c.is_dense] == [150]
    with pytest.raises(SettingsError, match="a share of which context"):
        prepared("cpu", budgets="50%", tasks=("niah_single", "niah_single@300"))


def test_a_share_is_of_the_prompts_that_are_taken_from_elsewhere(
    prepared: Prepare, tmp_path: Path
) -> None:
    write_campaign(tmp_path / "out", describe(prepared("cpu")))
    kept = {"samples_from": tmp_path / "out", "budgets": "25%", "context_tokens": "4096"}
    found = prepared("cpu", **kept)
    assert [c.attended_tokens for c in found.configurations if not c.is_dense] == [700 // 4]


def test_what_is_served_needs_no_budget_at_several_contexts(prepared: Prepare) -> None:
    given = {"policy": None, "bare": True, "as_served": True, "budgets": "12.5%"}
    found = prepared("cpu", context_tokens="512,700", **given)
    assert [item.budget for item in found.configurations] == ["all", AS_SERVED]
