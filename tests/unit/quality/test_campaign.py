# SPDX-License-Identifier: Apache-2.0
"""What is decided before a server starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality import campaign
from tandemkv.server.evaluation.quality.campaign import Campaign, prepare
from tandemkv.server.evaluation.quality.request import Request

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "max_position_embeddings": 2048,
}


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
        policy: str = "look_ahead",
        tasks: Sequence[str] = ("niah_single",),
    ) -> Campaign:
        request = Request(
            model=str(model),
            policies=policy,
            budgets="160",
            tasks=",".join(tasks),
            out=tmp_path / "out",
            samples=1,
            context_tokens=700,
            corpus=[text],
            device=device,
            dtype="bfloat16" if device == "cuda" else "float32",
            settings=["selection.num_recent_tokens=16", *given],
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


def test_a_policy_for_cpus_is_measured_beside_a_gpu(prepared: Prepare) -> None:
    host = ("cache_device=cpu", "cache_ranks=1")
    for given in (host, ()):
        found = prepared("cuda", *given, policy="lfps")
        settings = found.settings_of(found.configurations[-1])
        assert (settings.device, settings.selection.policy) == ("cuda", "lfps")
    for elsewhere in ("cache_device=cuda", "cache_ranks=0"):
        with pytest.raises(SettingsError, match="policy=lfps declares devices cpu, not cuda"):
            prepared("cuda", elsewhere, policy="lfps")


def test_where_the_cache_is_counts_in_a_result_s_digest_once_it_is_set(prepared: Prepare) -> None:
    digests = []
    for given in ((), ("cache_device=auto",), ("cache_device=cpu",)):
        found = prepared("cuda", *given)
        digests.append(found.digest_of(found.configurations[-1], "niah_single"))
    assert digests[0] == digests[1] != digests[2]


def test_a_first_turn_outlasts_the_others(prepared: Prepare) -> None:
    """A later turn finds its context cached, though as many first turns again came in between."""
    one, two = prepared("cpu"), prepared("cpu", tasks=("niah_single+turn",))
    longest = max(s.num_tokens for found in two.prompts.samples.values() for s in found)
    assert one.base.cache.capacity_tokens >= 4096
    assert two.base.cache.capacity_tokens >= 2 * two.request.concurrency * longest
