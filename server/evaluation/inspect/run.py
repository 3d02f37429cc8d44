# SPDX-License-Identifier: Apache-2.0
"""One request through the serving path, with the probes of both ranks on."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tandemkv.cache_rank.engine.selection_probe import selection_file
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.settings.rank_settings import DETAIL_VARIABLE
from tandemkv.server.checks.preflight import resolve_model
from tandemkv.server.evaluation.quality.servers import tandem_server, terminable
from tandemkv.server.evaluation.tokenizing import load_tokenizer
from tandemkv.server.settings.launch_settings import ServeSettings

from .recording import Recording, make_page, read_recording


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was looked at: the page, and how much is in it."""

    html: str
    prompt_tokens: int
    steps: int


def inspect_prompt(settings: ServeSettings, text: str, *, max_new_tokens: int) -> Inspection:
    """Serve `text` once, greedily, and return the page.

    Raises `SettingsError` if the policy selects nothing that could be shown, or the prompt does not
    fit; `RecordingError` if no step was sparse; `MeasurementError` if the server did not start or
    answer.
    """
    selection = settings.selection
    if selection.declared.keeps_sink_only:
        raise SettingsError(
            f"policy={selection.policy}: nothing but the sink is made resident, there is nothing "
            "to look at; inspect shows policies that select, such as look_ahead"
        )
    model_dir = resolve_model(settings.model, lambda _: None)
    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer.encode(text)
    resident = selection.num_resident + selection.num_recent_tokens
    if len(ids) + max_new_tokens <= resident:
        raise SettingsError(
            f"the prompt has {len(ids)} tokens, and {resident} are resident anyhow: give a longer "
            "prompt, or lower --budget-tokens or --resident-factor"
        )
    most = _longest_request(settings, model_dir)
    if len(ids) + max_new_tokens > most:
        raise SettingsError(
            f"the prompt has {len(ids)} tokens, and {max_new_tokens} are to follow: with these "
            f"settings a request has {most} at most; give a shorter prompt, or fewer "
            "--max-new-tokens"
        )
    recording, new = _record(settings, ids, max_new_tokens)
    tokens = [tokenizer.decode([token]) for token in (*ids, *new)]
    facts = {
        "model": Path(settings.model).name,
        "policy": selection.policy,
        "prompt": f"{len(ids)} tokens",
        "generated": f"{len(new)} tokens",
        "K": str(selection.budget_tokens),
        "resident": f"{selection.num_resident} + {selection.num_recent_tokens} recent",
        "samples": str(selection.num_samples),
        "exact layers (not shown)": ",".join(map(str, selection.exact_layer_ids)) or "none",
        "mean mass": str(round(float(np.mean(recording.mass)), 4)),
    }
    html = make_page(recording, tokens=tokens, prompt_tokens=len(ids), facts=facts)
    return Inspection(html=html, prompt_tokens=len(ids), steps=len(recording.lengths))


def _longest_request(settings: ServeSettings, model_dir: Path) -> int:
    """Return how many tokens a request may have, prompt and answer together."""
    spec = read_model_spec(model_dir, dtype="float32", max_context=settings.max_context)
    return min(spec.max_context, settings.cache.capacity_tokens)


def _record(
    settings: ServeSettings, ids: list[int], max_new_tokens: int
) -> tuple[Recording, list[int]]:
    """Serve a prompt with the probes on; return what they wrote, and the new tokens."""
    own = settings.model_copy(update={"evaluation": True, "max_running_requests": 1})
    environ = {DETAIL_VARIABLE: "1"}
    params = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": params}
    serving = tandem_server(own, threading.Event(), probes=True, environ=environ)
    with terminable(), serving as server:
        reply = server.generate(body)
        assert server.probe_file is not None
        recording = read_recording(server.probe_file, selection_file(server.probe_file))
    return recording, [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]]
