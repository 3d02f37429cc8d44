# SPDX-License-Identifier: Apache-2.0
"""A campaign on servers that only pretend: order, resuming, failures."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality import runner
from tandemkv.server.evaluation.quality.campaign import Campaign, describe
from tandemkv.server.evaluation.quality.configurations import parse_budgets, plan
from tandemkv.server.evaluation.quality.prompts import Prompts, describe_task
from tandemkv.server.evaluation.quality.report import write_campaign, write_report
from tandemkv.server.evaluation.quality.request import Request
from tandemkv.server.evaluation.quality.results import read_result, read_runs, write_result
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.quality.servers import MeasurementError, NoAnswerError
from tandemkv.server.evaluation.quality.tasks.base import TaskInputs
from tandemkv.server.evaluation.quality.tasks.registry import find_tasks
from tandemkv.server.settings.launch_settings import ServeSettings

TASKS = ["perplexity", "continuation", "niah_single"]
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=4,
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim=8,
    hidden_size=16,
    max_context=4096,
    dtype="float32",
    model_hash="h",
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, fake_server: Any) -> list[Any]:
    """Fake servers instead of real ones; returns those that were started, with their policy."""
    found: list[Any] = []
    lock = threading.Lock()

    @contextlib.contextmanager
    def tandem(settings: ServeSettings, stop: Any, *, probes: bool = False) -> Iterator[Any]:
        assert settings.evaluation
        server = fake_server(fails=settings.selection.policy in failing, is_stock=False)
        server.forces = "forcing" not in failing
        with lock:
            found.append((settings.selection.policy, server))
        yield server

    @contextlib.contextmanager
    def stock(settings: ServeSettings, **options: Any) -> Iterator[Any]:
        server = fake_server(is_stock=True, fails="dense" in failing)
        with lock:
            found.append(("dense", server))
        yield server

    failing.clear()
    monkeypatch.setattr(runner, "tandem_server", tandem)
    monkeypatch.setattr(runner, "stock_server", stock)
    return found


failing: set[str] = set()


@pytest.fixture
def campaign(tmp_path: Path, inputs: TaskInputs, corpus: Corpus) -> Campaign:
    request = Request(
        model="m",
        policies="look_ahead,streaming",
        budgets="200",
        tasks=",".join(TASKS),
        out=tmp_path / "out",
        concurrency=2,
    )
    tasks = find_tasks(TASKS)
    return Campaign(
        request=request,
        model_dir=tmp_path / "model",
        device="cpu",
        dtype="float32",
        spec=SPEC,
        tokenizer=_Tolerant(),  # type: ignore[arg-type]
        tasks=tasks,
        prompts=prompts_of(request, {task.name: task.samples(inputs) for task in tasks}, corpus),
        configurations=plan(
            ["look_ahead", "streaming"],
            parse_budgets(["200"], [700]),
            num_layers=4,
            device="cpu",
            base={"num_recent_tokens": 16},
        ),
        base=ServeSettings.model_validate(
            {"model": "m", "evaluation": True, "selection": {"num_recent_tokens": 16}}
        ),
    )


def prompts_of(
    request: Request, samples: dict[str, list[Sample]], corpus: Corpus | None = None
) -> Prompts:
    tasks = {task.name: task for task in find_tasks(TASKS)}
    described = {
        name: describe_task(request, tasks[name], found) for name, found in samples.items()
    }
    texts = [] if corpus is None else corpus.describe()
    return Prompts(samples, described, {"corpus": texts, "corpus_absent": []})


class _Tolerant:
    """Decodes ids that the corpus never had."""

    eos_token_id = None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return " ".join(map(str, ids))


def run(campaign: Campaign, jobs: int = 1) -> str:
    console = Console(file=io.StringIO(), width=200)
    runner.run(campaign, console, jobs=jobs)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("jobs", [1, 3])
def test_everything_is_measured_once_and_kept(
    campaign: Campaign, started: list[Any], jobs: int
) -> None:
    run(campaign, jobs)
    assert sorted(name for name, _ in started) == ["dense", "look_ahead", "streaming"]
    assert [server.num_forgotten for _, server in started] == [len(TASKS)] * 3
    found = {c.slug: results for c, results in read_runs(campaign.runs)}
    assert {slug: sorted(results) for slug, results in found.items()} == {
        slug: sorted(TASKS)
        for slug in ("sglang-dense-all", "tandemkv-look-ahead-200", "tandemkv-streaming-200")
    }
    run(campaign, jobs)
    assert len(started) == 3


def test_only_what_is_missing_is_measured_again(campaign: Campaign, started: list[Any]) -> None:
    run(campaign)
    (campaign.runs / "tandemkv-streaming-200" / "niah_single.json").unlink()
    started.clear()
    run(campaign)
    ((name, server),) = started
    assert name == "streaming"
    assert len(server.asked) == len(campaign.prompts.samples["niah_single"])


def test_other_settings_or_samples_are_measured_again(
    campaign: Campaign, started: list[Any]
) -> None:
    run(campaign)
    started.clear()
    base = campaign.base.model_copy(update={"max_running_requests": 3})
    text = run(dataclasses.replace(campaign, base=base))
    assert len(started) == 3
    assert "of another setting, measured again" in text
    started.clear()
    fewer = {name: list(samples[:2]) for name, samples in campaign.prompts.samples.items()}
    prompts = prompts_of(campaign.request, fewer)
    run(dataclasses.replace(campaign, base=base, prompts=prompts))
    assert all(len(server.asked) == 6 for _, server in started)


def test_a_row_has_no_results_of_other_settings_from_an_earlier_campaign(
    campaign: Campaign, started: list[Any]
) -> None:
    run(campaign)
    tasks = find_tasks(["niah_single"])
    samples = {"niah_single": list(campaign.prompts.samples["niah_single"])}
    next_one = dataclasses.replace(
        campaign, tasks=tasks, prompts=prompts_of(campaign.request, samples)
    )
    started.clear()
    run(next_one)
    assert not started
    assert all(set(found) == set(TASKS) for _, found in read_runs(campaign.runs))
    base = campaign.base.model_copy(update={"max_running_requests": 3})
    text = run(dataclasses.replace(next_one, base=base))
    assert "perplexity  is of another setting, kept as perplexity.other" in text
    assert all(set(found) == {"niah_single"} for _, found in read_runs(campaign.runs))
    assert (campaign.runs / "tandemkv-streaming-200" / "continuation.other").is_file()


def test_an_agreement_is_kept_beside_the_dense_result_that_is_kept(
    campaign: Campaign, started: list[Any]
) -> None:
    run(campaign)
    samples = {"niah_single": list(campaign.prompts.samples["niah_single"])}
    next_one = dataclasses.replace(
        campaign,
        tasks=find_tasks(["niah_single"]),
        prompts=prompts_of(campaign.request, samples),
        configurations=[each for each in campaign.configurations if not each.is_dense],
    )
    run(next_one)
    assert all(set(found) == set(TASKS) for _, found in read_runs(campaign.runs))
    dense = campaign.runs / "sglang-dense-all"
    written = read_result(dense, "continuation")
    assert written is not None
    write_result(dense, msgspec.structs.replace(written, digest="of other settings"))
    assert "continuation.other" in run(next_one)
    assert {c.is_dense: set(found) for c, found in read_runs(campaign.runs)} == {
        True: set(TASKS), False: {"perplexity", "niah_single"},
    }  # fmt: skip


def test_nothing_is_measured_again_for_what_it_does_not_read(
    campaign: Campaign, started: list[Any]
) -> None:
    run(campaign)
    started.clear()
    selection = campaign.base.selection.model_copy(update={"fetch_cap": 2})
    base = campaign.base.model_copy(update={"selection": selection})
    run(dataclasses.replace(campaign, base=base))
    assert [name for name, _ in started] == ["look_ahead"]  # streaming does not read it either


def test_one_that_fails_does_not_lose_the_others(campaign: Campaign, started: list[Any]) -> None:
    failing.add("look_ahead")
    with pytest.raises(MeasurementError, match=r"1 of 3 .* failed: tandemkv-look-ahead-200"):
        run(campaign)
    assert read_result(campaign.runs / "tandemkv-streaming-200", "perplexity") is not None
    failing.clear()
    started.clear()
    run(campaign)
    assert [name for name, _ in started] == ["look_ahead"]


def test_a_task_that_fails_does_not_lose_the_others(campaign: Campaign, started: list[Any]) -> None:
    failing.add("forcing")
    with pytest.raises(MeasurementError, match="2 of 3 configurations failed"):
        run(campaign)
    folder = campaign.runs / "tandemkv-look-ahead-200"
    assert read_result(folder, "perplexity") is None
    assert read_result(folder, "niah_single") is not None


def test_dense_is_compared_with_where_it_succeeded(
    campaign: Campaign, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner.measure

    def measure(server: Any, **options: Any) -> Any:
        if server.is_stock and options["task"] == "niah_single":
            raise MeasurementError("no")
        return whole(server, **options)

    monkeypatch.setattr(runner, "measure", measure)
    with pytest.raises(MeasurementError, match="1 of 3 configurations failed: sglang-dense-all"):
        run(campaign)
    assert read_result(campaign.runs / "tandemkv-look-ahead-200", "continuation") is not None


def test_an_answer_ends_at_each_token_that_the_model_s_files_end_it_with(
    campaign: Campaign, started: list[Any]
) -> None:
    def written() -> list[str]:
        run(campaign)
        found = read_result(campaign.runs / "tandemkv-streaming-200", "niah_single")
        assert found is not None
        return (found.answers[0].text or "").split()

    whole = written()
    shutil.rmtree(campaign.runs)
    campaign.model_dir.mkdir()
    for name, ends in (("config", int(whole[4])), ("generation_config", [7, int(whole[2])])):
        text = json.dumps({"eos_token_id": ends})
        (campaign.model_dir / f"{name}.json").write_text(text, encoding="utf-8")
    assert written() == whole[:2]


def test_a_server_that_is_gone_is_asked_no_more(
    campaign: Campaign, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(server: Any, **options: Any) -> Any:
        asked.append(options["task"])
        raise NoAnswerError("connection refused")

    monkeypatch.setattr(runner, "measure", measure)
    with pytest.raises(MeasurementError, match="3 of 3"):
        run(campaign)
    assert asked == [TASKS[0]] * 3


def test_without_dense_what_is_compared_with_it_fails_and_the_rest_is_kept(
    campaign: Campaign, started: list[Any]
) -> None:
    failing.add("dense")
    with pytest.raises(MeasurementError, match="3 of 3 configurations failed"):
        run(campaign)
    folder = campaign.runs / "tandemkv-look-ahead-200"
    assert read_result(folder, "perplexity") is not None
    assert read_result(folder, "continuation") is None


def test_a_campaign_becomes_a_report(campaign: Campaign, started: list[Any]) -> None:
    run(campaign)
    out = campaign.request.out
    write_campaign(out, describe(campaign))
    paths = write_report(out, Console(file=io.StringIO()))
    assert {path.name for path in paths} >= {"report.json", "report.md", "report.html"}
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["dense", "look_ahead", "streaming"]
    ours = rows[1]
    assert ours["attended_tokens"] == 200
    assert ours["moved_rows"] == pytest.approx(2.5)
    # 2 * 8 numbers of 4 bytes a row
    assert ours["moved_kib"] == pytest.approx(2.5 * 64 / 1024)
    # 2 of 4 layers are exact, the others attend to a quarter
    assert ours["scores"]["perplexity"]["attended_share"] == pytest.approx(0.625)
    assert ours["scores"]["perplexity"]["change"] == pytest.approx(0.0)
    assert ours["scores"]["continuation"]["value"] == 1.0


def test_a_report_leaves_out_results_on_other_samples(
    campaign: Campaign, started: list[Any]
) -> None:
    run(campaign)
    fewer = {name: list(samples[:2]) for name, samples in campaign.prompts.samples.items()}
    only_dense = dataclasses.replace(
        campaign,
        prompts=prompts_of(campaign.request, fewer),
        configurations=campaign.configurations[:1],
    )
    run(only_dense)
    out = campaign.request.out
    write_campaign(out, describe(only_dense))
    write_report(out, Console(file=io.StringIO()))
    found = json.loads((out / "report.json").read_text())
    assert [row["policy"] for row in found["rows"]] == ["dense"]
    assert "tandemkv-streaming-200: perplexity" in found["left_out"]
    assert "Left out, measured on other samples" in (out / "report.md").read_text()


def test_parts_ask_their_own_samples_and_count_for_themselves(
    campaign: Campaign, started: list[Any]
) -> None:
    second = dataclasses.replace(
        campaign, request=dataclasses.replace(campaign.request, part="2/2")
    )
    run(second)
    folder = campaign.runs / "tandemkv-look-ahead-200"
    kept = read_result(folder, "niah_single")
    assert kept is not None
    assert [answer.name for answer in kept.answers] == ["1", "3"]
    count = len(started)
    run(second)
    assert len(started) == count
    run(campaign)
    assert len(started) == 2 * count
    whole = read_result(folder, "niah_single")
    assert whole is not None
    assert whole.samples_digest == kept.samples_digest
    assert [answer.name for answer in whole.answers] == ["0", "1", "2", "3"]


def test_what_a_server_measured_at_its_start_is_kept_for_open_settings(
    campaign: Campaign, started: list[Any]
) -> None:
    """Also when the same command finds everything done, and starts no server."""
    plain = campaign.configurations[-1]
    opened = msgspec.structs.replace(
        plain, selection={"policy": "look_ahead", "budget_tokens": 128}, budget="K 128",
        policy="look_ahead", is_open=True, resolved={"budget_tokens": 128},
    )  # fmt: skip
    changed = dataclasses.replace(campaign, configurations=[campaign.configurations[0], opened])
    for _ in range(2):
        run(changed)
        found = {c.slug: c for c, _ in read_runs(changed.runs)}
        assert found[opened.slug].resolved == {
            "budget_tokens": 128, "measured_at_start": {"plan_refresh_steps": 1.0},
        }  # fmt: skip
    assert [name for name, _ in started] == ["dense", "look_ahead"]


def test_time_left_counts_tokens_read_and_decoded() -> None:
    short = Sample(name="a", mode="generate", context_ids=[1] * 640, num_new_tokens=6)
    long = Sample(name="b", mode="force", context_ids=[1] * 64, forced_ids=[], num_new_tokens=499)
    assert (runner.work_of(short), runner.work_of(long)) == (16.0, 500.0)
