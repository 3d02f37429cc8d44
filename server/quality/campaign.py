# SPDX-License-Identifier: Apache-2.0
"""Everything that is decided before the first server starts."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.exchange_settings import CacheSettings
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, read_model_spec
from tandemkv.server.devices import resolve_device
from tandemkv.server.policy_options import split_option
from tandemkv.server.preflight import resolve_dtype, resolve_model
from tandemkv.server.settings import ServeSettings
from tandemkv.server.settings_sources import Sourced, load_settings, read_assignments

from .configurations import Configuration, parse_budgets, plan
from .corpus import Corpus, built_in_corpus, read_corpus
from .kept_samples import KeptSamples
from .samples import Sample, digest, samples_digest, write_samples
from .tasks.base import Task, TaskInputs
from .tasks.registry import find_tasks
from .tokenizing import PromptBuilder, PromptStyle, Tokenizer, load_tokenizer

SPARE_TOKENS = 64
"""Room of a request beyond its own tokens, in the cache rank's capacity."""

_CAPACITY = "cache.capacity_tokens"
_DENSE_TOKENS = "selection.dense_tokens"
_PACKAGES = ("tandemkv", "sglang", "torch", "transformers", "numpy")

_LOCAL = (
    *("port", "run_dir", "model"),
    *("start_timeout_s", "drain_timeout_s", "hang_timeout_s", "max_restarts"),
)
"""Settings that change no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for. Budgets, tasks, settings and part are texts as given."""

    model: str
    policies: Sequence[str]
    budgets: Sequence[str]
    tasks: Sequence[str]
    out: Path
    num_samples: int = 8
    context_tokens: int = 4096
    num_forced_tokens: int = 128
    max_new_tokens: int | None = None
    corpus: Sequence[Path] = ()
    prompt_style: PromptStyle = "raw"
    seed: int = 0
    concurrency: int = 4
    with_dense: bool = True
    device: str = "auto"
    dtype: str = "auto"
    settings: Sequence[str] = ()
    config: Path | None = None
    samples_from: Path | None = None
    part: str | None = None
    dense_args: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A checked request: what to run, and where results go.

    `samples` are all of a task; `asked` returns those that are asked in this run. `settings_of`
    returns the settings of the server of a configuration, `dense_args` are more arguments of
    stock SGLang.
    """

    request: Request
    model_dir: Path
    device: str
    dtype: str
    spec: ModelSpec
    tokenizer: Tokenizer
    corpus: Corpus | None
    tasks: Sequence[Task]
    samples: Mapping[str, Sequence[Sample]]
    configurations: Sequence[Configuration]
    base: ServeSettings
    part: tuple[int, int] = (1, 1)
    dense_args: tuple[str, ...] = ()
    kept: KeptSamples | None = None

    @property
    def runs(self) -> Path:
        """Folder of the results."""
        return self.request.out / "runs"

    def asked(self, task: str) -> list[Sample]:
        """Return the samples of a task that this part of the campaign asks."""
        number, parts = self.part
        return list(self.samples[task][number - 1 :: parts])

    def settings_of(self, configuration: Configuration) -> ServeSettings:
        """Return the whole tree for one server."""
        selection = resolve_selection(
            self.base.selection.model_dump(exclude={"options"}) | configuration.selection
        )
        return self.base.model_copy(update={"selection": selection})

    def digest_of(self, configuration: Configuration, task: str) -> str:
        """Return the digest under which a result counts."""
        settings = self.settings_of(configuration).model_dump(mode="json")
        for local in _LOCAL:
            del settings[local]
        if settings["cache_device"] == "auto":  # as results were that knew no such setting
            del settings["cache_device"]
        if configuration.system == "sglang":  # it knows nothing of these
            for group in ("selection", "exchange"):
                del settings[group]
        configured = msgspec.to_builtins(configuration)
        if not configured["variant"]:
            del configured["variant"]
        more: list[object] = [] if self.part == (1, 1) else [list(self.part)]
        if configuration.is_dense and self.dense_args:
            more.append(list(self.dense_args))
        return digest(
            samples_digest(self.samples[task]), configured, settings, self.spec.model_hash, *more
        )

    def applies(self, configuration: Configuration, task: Task) -> bool:
        """Whether a task says anything: mass needs what is attended to, on the inference rank."""
        has_all_here = configuration.attended_tokens is not None and not configuration.remote_tokens
        return task.measure != "mass" or has_all_here


def prepare(request: Request, note: Callable[[str], None]) -> Campaign:
    """Check a request, make the samples, and write them to ``samples/`` of its folder.

    Raises
    ------
    SettingsError
        If anything is unknown, missing, too short or too long; nothing has been started then.
    UnsupportedModelError
        If the model cannot be served.
    """
    tasks = find_tasks(request.tasks)
    part = _part(request.part)
    kept = None if request.samples_from is None else KeptSamples.of(request.samples_from)
    model_dir = resolve_model(request.model, note)
    device = resolve_device(request.device)
    dtype = resolve_dtype(request.dtype, device, model_dir)
    spec = read_model_spec(model_dir, dtype=dtype)
    flags = _flags(request, model_dir, device, dtype)
    draft = load_settings(flags, {}, request.config)
    if device == "cuda" and draft.selection.dense_tokens is None:
        # What serve would fill in is often longer than the prompts: dense against dense.
        flags[_DENSE_TOKENS] = Sourced(0, "tandemkv quality")
        draft = load_settings(flags, {}, request.config)
    if draft.selection.options:
        raise SettingsError(
            f"--config {request.config}: tandemkv quality measures several policies, and an option "
            "of one follows its name: --policies look_ahead+distance=2"
        )
    budgets = parse_budgets(request.budgets, request.context_tokens)
    configurations = plan(
        request.policies,
        budgets,
        num_layers=spec.num_layers,
        device=device,
        # In one process the cache rank is where the model is.
        cache_device=device if draft.rank_settings.exchange.is_in_process else draft.cache_device,
        base=draft.selection.model_dump(
            exclude_defaults=True, exclude={"policy", "declared", "options"}
        ),
        with_dense=request.with_dense,
    )
    if not configurations:
        raise SettingsError("nothing to measure: no policy is given and dense is left out")
    corpus = None
    if kept is None:
        corpus = read_corpus(request.corpus) if request.corpus else built_in_corpus()
    tokenizer = load_tokenizer(model_dir)
    samples = {}
    if kept is not None:
        kept.check_model(model_dir.name)
        samples = {task.name: kept.samples_of(task.name) for task in tasks}
    elif corpus is not None:
        inputs = TaskInputs(
            prompts=PromptBuilder(tokenizer, request.prompt_style),
            corpus=corpus,
            context_tokens=request.context_tokens,
            num_samples=request.num_samples,
            num_forced_tokens=request.num_forced_tokens,
            seed=request.seed,
            max_new_tokens=request.max_new_tokens,
        )
        for task in tasks:
            note(f"samples of {task.name}")
            samples[task.name] = task.samples(inputs)
    for name, found in samples.items():
        if len(found) < part[1]:
            raise SettingsError(
                f"part={request.part}: {name} has {len(found)} samples, fewer than parts"
            )
        write_samples(request.out / "samples" / f"{name}.jsonl", found)
    longest = max(sample.num_tokens for found in samples.values() for sample in found)
    if longest > spec.max_context:
        raise SettingsError(
            f"context_tokens={request.context_tokens}: the longest request has {longest} tokens, "
            f"the model takes {spec.max_context}; lower --context-tokens or --max-new-tokens"
        )
    _check_dense(request, tasks)
    if _CAPACITY not in flags and draft.cache.capacity_tokens == CacheSettings().capacity_tokens:
        # What one turn leaves in the cache must outlast the first turns of the others.
        turns = 2 if any(s.mode == "follow_up" for found in samples.values() for s in found) else 1
        needed = (longest + SPARE_TOKENS) * (turns * request.concurrency + 1)
        flags[_CAPACITY] = Sourced(max(4096, needed), "--concurrency")
    return Campaign(
        request=request,
        model_dir=model_dir,
        device=device,
        dtype=dtype,
        spec=spec,
        tokenizer=tokenizer,
        corpus=corpus,
        tasks=tasks,
        samples=samples,
        configurations=configurations,
        base=load_settings(flags, {}, request.config),
        part=part,
        dense_args=_dense_args(request.dense_args),
        kept=kept,
    )


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise SettingsError(f"part={text}: I/N is required, with I from 1 to N, e.g. 1/8")
    return int(match[1]), int(match[2])


def _dense_args(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"dense_args={text}: {error}") from error


def _check_dense(request: Request, tasks: Sequence[Task]) -> None:
    needing = [task.name for task in tasks if task.measure == "agreement"]
    if needing and not request.with_dense:
        raise SettingsError(
            f"task={needing[0]} compares with dense; leave out --no-dense (results that are kept "
            "in --out are not measured again)"
        )


def _flags(request: Request, model_dir: Path, device: str, dtype: str) -> dict[str, Sourced]:
    flags = {
        "model": Sourced(str(model_dir), "MODEL"),
        "device": Sourced(device, "--device"),
        "dtype": Sourced(dtype, "--dtype"),
        "evaluation": Sourced(True, "tandemkv quality"),
        "max_running_requests": Sourced(request.concurrency, "--concurrency"),
    }
    for text in request.settings:
        key, separator, value = text.partition("=")
        if not separator:
            raise SettingsError(f"--set {text}: KEY=VALUE is required, e.g. selection.fetch_cap=64")
        if key in (*flags, "port", "host", "run_dir", "selection.policy"):
            raise SettingsError(f"--set {text}: tandemkv quality sets {key} itself")
        option = split_option(key)
        if option is not None:
            raise SettingsError(
                f"--set {text}: an option of a policy follows its name: --policies "
                f"{option.policy}+{option.option}={value}"
            )
        flags |= read_assignments([text])
    return flags


def describe(campaign: Campaign) -> dict[str, Any]:
    """Return what the report says about how results came about."""
    request = campaign.request
    return {
        "format": "tandemkv-quality/1",
        "command": f"tandemkv {shlex.join(_relative(a) for a in sys.argv[1:])}",
        "date": datetime.date.today().isoformat(),
        "model": campaign.model_dir.name,
        "dtype": campaign.dtype,
        "device": campaign.device,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cores": os.cpu_count(),
        "num_layers": campaign.spec.num_layers,
        "num_kv_heads": campaign.spec.num_kv_heads,
        "head_dim": campaign.spec.head_dim,
        "concurrency": request.concurrency,
        **_described_corpus(campaign),
        "tasks": {
            task.name: campaign.kept.described[task.name]
            if campaign.kept is not None
            else {
                "title": task.title,
                "definition": task.definition,
                "source": task.source,
                "measure": task.measure,
                "samples": len(campaign.samples[task.name]),
                "samples_digest": samples_digest(campaign.samples[task.name]),
                "context_tokens": request.context_tokens,
                "forced_tokens": request.num_forced_tokens,
                "seed": request.seed,
                "prompt_style": request.prompt_style,
                "longest_tokens": max(s.num_tokens for s in campaign.samples[task.name]),
            }
            for task in campaign.tasks
        },
    }


def _described_corpus(campaign: Campaign) -> dict[str, Any]:
    if campaign.kept is not None:
        return campaign.kept.corpus
    assert campaign.corpus is not None
    described, absent = campaign.corpus.describe(), list(campaign.corpus.absent)
    return {"corpus": described, "corpus_absent": absent}


def _relative(argument: str) -> str:
    """Keep where things lie on this machine out of the report."""
    return Path(argument).name if argument.startswith(("/", "~")) else argument


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"
