# SPDX-License-Identifier: Apache-2.0
"""Parts of a campaign joined into one folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tandemkv.server.evaluation.quality.results import Answer, TaskResult

_PATH = Path(__file__).parents[2] / "bench" / "quality_merge.py"


@pytest.fixture(scope="module")
def join() -> Any:
    spec = importlib.util.spec_from_file_location("quality_merge", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.join


def result(names: list[str], share: float, steps: float, digest: str = "d") -> TaskResult:
    return TaskResult(
        task="niah_single",
        samples_digest=digest,
        digest="x",
        answers=[Answer(name=name, text="", score=1.0) for name in names],
        seconds=2.0,
        attended_share=share,
        request_steps=steps,
        counters={"inference.context_tokens_total": steps},
    )


def test_answers_are_joined_and_shares_weighted(join: Any) -> None:
    found = join(result(["10", "0"], 0.1, 30.0), result(["2"], 0.5, 10.0))
    assert [answer.name for answer in found.answers] == ["0", "2", "10"]
    assert found.attended_share == pytest.approx(0.2)
    assert (found.request_steps, found.seconds) == (40.0, 4.0)
    assert found.counters == {"inference.context_tokens_total": 40.0}


def test_equal_parts_count_once_and_others_are_refused(join: Any) -> None:
    one = result(["0", "1"], 0.1, 30.0)
    assert join(one, result(["1"], 0.9, 1.0)) == one
    with pytest.raises(SystemExit, match="overlap in part"):
        join(one, result(["1", "2"], 0.1, 1.0))
    with pytest.raises(SystemExit, match="different samples"):
        join(one, result(["2"], 0.1, 1.0, digest="other"))
