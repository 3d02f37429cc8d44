# SPDX-License-Identifier: Apache-2.0
"""Forced tokens take the place of sampled ones, by how long a request is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.sglang import hooks, teacher_forcing


def request(forced: list[int] | None, *, prompt: int = 3, outputs: int = 0) -> Any:
    params = None if forced is None else {"forced_token_ids": forced}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params),
        origin_input_ids=[1] * prompt,
        output_ids=[1] * outputs,
    )


def sample(
    monkeypatch: pytest.MonkeyPatch, reqs: list[Any], lengths: list[int], *, evaluation: bool = True
) -> tuple[list[int], list[float], int]:
    """Return ids, logprobs and how many were forced; 4 tokens, of which 0 is always sampled."""
    runtime = SimpleNamespace(
        settings=SimpleNamespace(evaluation=evaluation),
        running_reqs=reqs,
        running_lengths=lengths,
        counters=SimpleNamespace(forced_tokens_total=0),
    )
    monkeypatch.setattr(runtime_module, "current", lambda: runtime)
    output = SimpleNamespace(
        next_token_logits=torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(len(reqs), 1),
        next_token_logprobs=torch.zeros(len(reqs)),
    )
    ids = teacher_forcing.around_sampler(
        lambda *_: torch.zeros(len(reqs), dtype=torch.int64), None, output
    )
    logprobs = output.next_token_logprobs.tolist()
    return ids.tolist(), logprobs, runtime.counters.forced_tokens_total


def test_each_step_forces_its_own_token_though_outputs_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under overlap scheduling: the token of the step before is not among the outputs yet."""
    for step, outputs in enumerate([0, 0, 1]):
        found, logprobs, num_forced = sample(
            monkeypatch, [request([3, 1, 2], outputs=outputs), request(None)], [3 + step, 7]
        )
        assert found == [[3, 1, 2][step], 0]
        want = torch.tensor([3.0, 2.0, 1.0, 0.0]).log_softmax(0)[found[0]]
        assert logprobs == pytest.approx([float(want), 0.0])
        assert num_forced == 1


def test_nothing_is_forced_within_a_chunked_prompt_or_behind_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sample(monkeypatch, [request([3, 1])] * 2, [2, 5])[0] == [0, 0]


def test_after_a_retraction_the_next_token_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(monkeypatch, [request([3, 1, 2], outputs=2)], [5])[0] == [2]


def test_nothing_is_forced_without_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(monkeypatch, [request([3, 1])], [3], evaluation=False)[0] == [0]


@pytest.mark.parametrize("on_host", [True, False])
def test_lengths_are_those_of_the_batch_that_comes_next(on_host: bool) -> None:
    lengths = torch.tensor([7, 4])
    runtime: Any = SimpleNamespace(settings=SimpleNamespace(evaluation=True), running_lengths=[])
    batch = SimpleNamespace(
        reqs=["a", "b"],
        chunked_req=None,
        seq_lens=lengths,
        seq_lens_cpu=lengths if on_host else None,
    )
    hooks._note_batch(runtime, batch)
    assert (runtime.running_reqs, runtime.running_lengths) == (["a", "b"], [7, 4])


def test_lengths_are_not_read_without_evaluation() -> None:
    runtime: Any = SimpleNamespace(settings=SimpleNamespace(evaluation=False))
    batch = SimpleNamespace(reqs=["a"], chunked_req=None)
    hooks._note_batch(runtime, batch)
    assert runtime.running_reqs == ["a"]
