# SPDX-License-Identifier: Apache-2.0
"""Everything that is decided before the first server starts."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.cache_rank.policies.registry import read_by, resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError, TandemKVError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, read_model_spec
from tandemkv.cache_rank.protocol.settings.exchange_settings import CacheSettings
from tandemkv.server.checks.preflight import check_capacity, resolve_dtype, resolve_model
from tandemkv.server.evaluation.corpus import built_in_corpus, read_corpus
from tandemkv.server.evaluation.provenance import installed_versions, own_command
from tandemkv.server.evaluation.result_file import check_result_folder
from tandemkv.server.evaluation.tokenizing import Tokenizer, load_tokenizer
from tandemkv.server.models.calibrated import channels_file, queries_file
from tandemkv.server.plan.devices import resolve_device
from tandemkv.server.plan.placement_choice import resolve_placement
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.policy_options import split_option
from tandemkv.server.settings.sources import Sourced, load_settings, read_assignments

from .configurations import Configuration, dense_of, parse_budgets, plan
from .prompts import Prompts
from .request import Request, names_in
from .results import TaskResult, read_result
from .samples import Sample, digest, write_samples
from .served import (
    AS_SERVED,
    Resolve,
    check_prompts_fit,
    grid_configurations,
    named,
    open_configuration,
    with_open_selection,
)
from .tasks.base import Task
from .tasks.registry import find_tasks

SPARE_TOKENS = 64
"""Room of a request beyond its own tokens, in the cache rank's capacity."""

_CAPACITY = "cache.capacity_tokens"
_DENSE_TOKENS = "selection.dense_tokens"
_LOCAL = (
    *("port", "run_dir", "model"),
    *("start_timeout_s", "drain_timeout_s", "hang_timeout_s", "max_restarts"),
)
"""Settings that change no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A checked request: what to run, and where results go.

    `base` are the settings of every server but for its configuration's own, `served` those that
    ``tandemkv serve`` would load; `choice` is what it would make of them, or why it would refuse.
    `asked` returns the samples that are asked in this run.
    """

    request: Request
    model_dir: Path
    device: str
    dtype: str
    spec: ModelSpec
    tokenizer: Tokenizer
    tasks: Sequence[Task]
    prompts: Prompts
    configurations: Sequence[Configuration]
    base: ServeSettings
    served: ServeSettings | None = None
    choice: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> Path:
        """Folder of the results."""
        return self.request.folder / "runs"

    def asked(self, task: str) -> list[Sample]:
        """Return the samples of a task that this part of the campaign asks."""
        number, parts = self.request.part_of
        return list(self.prompts.samples[task][number - 1 :: parts])

    def settings_of(self, configuration: Configuration) -> ServeSettings:
        """Return the whole tree for one server."""
        if configuration.budget == AS_SERVED and self.served is not None:
            return self.served
        if configuration.is_open:
            return with_open_selection(self.base, configuration.selection)
        base = self.base.selection.model_dump(exclude={"options"})
        policy = str(configuration.selection.get("policy", self.base.selection.policy))
        selection = resolve_selection(read_by(policy, base, configuration.selection))
        return self.base.model_copy(update={"selection": selection})

    def digest_of(self, configuration: Configuration, task: str) -> str:
        """Return the digest under which a result counts."""
        about = self.prompts.tasks[task]
        samples = about["samples_digest"]
        dense = self._of_dense(samples) if about["measure"] == "agreement" else []
        return self._digest(configuration, samples, dense)

    def is_of(self, configuration: Configuration, kept: TaskResult) -> bool:
        """Whether the result of another campaign, on its own samples, is of these settings.

        What it is compared with is what dense is now, or the result of dense that is kept.
        """
        samples, dense = kept.samples_digest, list[str]()
        if any(answer.agrees is not None for answer in kept.answers):
            dense = self._of_dense(samples)
            if not dense:
                written = read_result(self.runs / dense_of(self.spec.num_layers).slug, kept.task)
                dense = [] if written is None else [written.digest]
        return kept.digest == self._digest(configuration, samples, dense)

    def _of_dense(self, samples: str) -> list[str]:
        return [self._digest(each, samples) for each in self.configurations if each.is_dense]

    def _digest(
        self, configuration: Configuration, samples: str, compared_with: Sequence[str] = ()
    ) -> str:
        settings = self.settings_of(configuration).model_dump(mode="json")
        for local in _LOCAL:
            del settings[local]
        del settings["cache"]["capacity_tokens"]  # follows the longest prompt of all tasks
        if configuration.system == "sglang":  # it knows nothing of these
            for group in ("selection", "exchange"):
                del settings[group]
        configured = msgspec.to_builtins(configuration)
        if not configured["variant"]:
            del configured["variant"]
        if not configuration.is_open:  # `settings` have it all
            del configured["is_open"], configured["resolved"]
        part, dense_argv = self.request.part_of, self.request.dense_argv
        more: list[object] = [] if part == (1, 1) else [list(part)]
        if configuration.is_dense and dense_argv:
            more.append(list(dense_argv))
        if configuration.system != "sglang":
            more += _contents(self.settings_of(configuration), self.spec)
        if not configuration.is_dense:
            # With what dense wrote, which is measured again where its own settings change.
            more += compared_with
        return digest(samples, configured, settings, self.spec.model_hash, *more)

    def applies(self, configuration: Configuration, task: Task) -> bool:
        """Whether a task says anything: mass needs what is attended to, on the inference rank."""
        has_all_here = configuration.attended_tokens is not None and not configuration.remote_tokens
        return task.measure != "mass" or has_all_here


def prepare(request: Request, note: Callable[[str], None]) -> Campaign:
    """Check a request, make the samples, and write them to ``samples/`` of its folder.

    Nothing is started. Raises `SettingsError` if anything is unknown, missing, too short or too
    long; `UnsupportedModelError` if the model cannot be served.
    """
    check_result_folder(request.folder, "--out")
    tasks = find_tasks(request.task_names, request.contexts)
    _check_part_and_dense(request, tasks)
    model_dir = resolve_model(request.model or "", note)
    device = resolve_device(request.device)
    dtype = resolve_dtype(request.dtype, device, model_dir)
    spec = read_model_spec(model_dir, dtype=dtype)
    flags = _flags(request, model_dir, device, dtype)
    base = load_settings(flags, {}, request.config)
    # What `tandemkv serve` would load: flags, its environment variables, its file.
    served = load_settings(_served_flags(request, model_dir), os.environ, request.config)
    resolve = functools.partial(
        resolve_placement, spec=spec, model_dir=model_dir, device=device, progress=lambda _: None
    )
    kept = None
    if request.samples_from is not None:
        names = [task.name for task in tasks]
        kept = Prompts.kept(request.samples_from.expanduser(), names, model_dir.name)
    lengths = _lengths(request, tasks, kept)
    configurations = _configurations(request, lengths, base, served, spec, device, resolve)
    tokenizer, prompts = _prompts(request, tasks, kept, model_dir, note)
    _check_samples(request, prompts, spec)
    if request.as_served:
        check_prompts_fit(served, prompts.longest)
    base = _with_capacity(request, flags, base, prompts)
    for settings in (base, served):
        check_capacity(settings)
    for name, found in prompts.samples.items():
        write_samples(request.folder / "samples" / f"{name}.jsonl", found)
    campaign = Campaign(
        request=request,
        model_dir=model_dir,
        device=device,
        dtype=dtype,
        spec=spec,
        tokenizer=tokenizer,
        tasks=tasks,
        prompts=prompts,
        configurations=configurations,
        base=base,
        served=served,
        choice=_named_or_refused(served, resolve),
    )
    decided = [_with_resolved(campaign, item, resolve) for item in configurations]
    return replace(campaign, configurations=decided)


def _with_capacity(
    request: Request, flags: Mapping[str, Sourced], base: ServeSettings, prompts: Prompts
) -> ServeSettings:
    """Make room for all requests at once, where no capacity is given."""
    if _CAPACITY in flags or base.cache.capacity_tokens != CacheSettings().capacity_tokens:
        return base
    # What one turn leaves in the cache must outlast the first turns of the others.
    modes = {sample.mode for found in prompts.samples.values() for sample in found}
    turns = 2 if "follow_up" in modes else 1
    needed = (prompts.longest + SPARE_TOKENS) * (turns * request.concurrency + 1)
    more = {_CAPACITY: Sourced(max(4096, needed), "--concurrency")}
    return load_settings({**flags, **more}, {}, request.config)


def _served_flags(request: Request, model_dir: Path) -> dict[str, Sourced]:
    """Return what ``tandemkv serve`` would be told on its command line."""
    given = {"device": request.device, "dtype": request.dtype}
    return {
        "model": Sourced(str(model_dir), "MODEL"),
        **read_assignments(request.settings or ()),
        "evaluation": Sourced(True, "tandemkv quality"),
        **{name: Sourced(x, f"--{name}") for name, x in given.items() if x != "auto"},
    }


def _named_or_refused(settings: ServeSettings, resolve: Resolve) -> dict[str, Any]:
    try:
        return dict(named(resolve(settings)))
    except TandemKVError as error:
        return {"refused": str(error)}


def _with_resolved(campaign: Campaign, item: Configuration, resolve: Resolve) -> Configuration:
    """Enter what its server decides; what would be refused fails when it is started."""
    if item.system != "tandemkv" or item.is_open:
        return item
    found = _named_or_refused(campaign.settings_of(item), resolve)
    return msgspec.structs.replace(item, resolved=found)


def _check_part_and_dense(request: Request, tasks: Sequence[Task]) -> None:
    _ = request.part_of, request.dense_argv  # raise if they cannot be read
    needing = [task.name for task in tasks if task.measure == "agreement"]
    if needing and request.no_dense:
        raise SettingsError(
            f"task={needing[0]} compares with dense; leave out --no-dense (results that are kept "
            "in --out are not measured again)"
        )


def _contents(settings: ServeSettings, spec: ModelSpec) -> list[str]:
    """Return digests of the files that are named, or may be taken up: their paths stay the same."""
    selection = settings.selection
    named = selection.declared.predictor, selection.index_channels, selection.calibration
    paths = [Path(name).expanduser() for name in named if name]
    if settings.calibrated:
        paths += [queries_file(spec, selection.declared.layers_ahead), channels_file(spec)]
    return [_content(path, path.stat().st_mtime_ns) for path in paths if path.is_file()]


@functools.lru_cache
def _content(path: Path, _changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _flags(request: Request, model_dir: Path, device: str, dtype: str) -> dict[str, Sourced]:
    """Return the settings that are the same for every server."""
    flags = {
        "model": Sourced(str(model_dir), "MODEL"),
        "device": Sourced(device, "--device"),
        "dtype": Sourced(dtype, "--dtype"),
        "evaluation": Sourced(True, "tandemkv quality"),
        "max_running_requests": Sourced(request.concurrency, "--concurrency"),
    }
    own = {*flags, "port", "host", "run_dir", "selection.policy"}
    for text in request.settings or ():
        key, separator, value = text.partition("=")
        if not separator:
            raise SettingsError(f"--set {text}: KEY=VALUE is required, e.g. selection.fetch_cap=64")
        if key.strip() in own:
            raise SettingsError(f"--set {text}: tandemkv quality sets {key.strip()} itself")
        option = split_option(key.strip())
        if option is not None:
            raise SettingsError(
                f"--set {text}: an option of a policy follows its name: --policies "
                f"{option.policy}+{option.option}={value}"
            )
        flags |= read_assignments([text])
    draft = load_settings(flags, {}, request.config)
    if draft.selection.options:
        raise SettingsError(
            f"--config {request.config}: tandemkv quality measures several policies, and an option "
            "of one follows its name: --policies look_ahead+distance=2"
        )
    if "calibrated" not in draft.model_fields_set:  # a setting is what stands in the command
        flags["calibrated"] = Sourced(False, "tandemkv quality")
    if device == "cuda" and draft.selection.dense_tokens is None:
        # What serve would fill in is often longer than the prompts: dense against dense.
        flags[_DENSE_TOKENS] = Sourced(0, "tandemkv quality")
    return flags


def _lengths(request: Request, tasks: Sequence[Task], kept: Prompts | None) -> list[int]:
    """Return the lengths of the prompts; a task may have its own, and those `kept` have theirs."""
    if kept is not None:
        return sorted({about["context_tokens"] for about in kept.tasks.values()})
    return sorted({task.context_tokens or request.contexts[0] for task in tasks})


def _configurations(
    request: Request,
    lengths: Sequence[int],
    base: ServeSettings,
    served: ServeSettings,
    spec: ModelSpec,
    device: str,
    resolve: Resolve,
) -> list[Configuration]:
    policies = names_in(request.policy_names)
    found = plan(
        policies,
        # What is served, or in a grid, has no use for them.
        parse_budgets(names_in(request.budgets), lengths) if policies else [],
        num_layers=spec.num_layers,
        device=device,
        base=base.selection.model_dump(
            exclude_defaults=True, exclude={"policy", "declared", "options"}
        ),
        with_dense=not request.no_dense,
    )
    if request.as_served:
        found.append(open_configuration(resolve(served), AS_SERVED, {}, spec.num_layers))
    if request.grid is not None:
        path = request.grid.expanduser()
        found += grid_configurations(path, base, device, spec.num_layers, resolve)
    if not found:
        raise SettingsError("nothing to measure: no policy is given and dense is left out")
    windowed = list(spec.other_layers)
    return [msgspec.structs.replace(x, windowed_layers=windowed) for x in found]


def _prompts(
    request: Request,
    tasks: Sequence[Task],
    kept: Prompts | None,
    model_dir: Path,
    note: Callable[[str], None],
) -> tuple[Tokenizer, Prompts]:
    if kept is not None:
        return load_tokenizer(model_dir), kept
    paths = [path.expanduser() for path in request.corpus or ()]
    corpus = read_corpus(paths) if paths else built_in_corpus()
    tokenizer = load_tokenizer(model_dir)
    return tokenizer, Prompts.make(request, tasks, tokenizer, corpus, note)


def _check_samples(request: Request, prompts: Prompts, spec: ModelSpec) -> None:
    for name, found in prompts.samples.items():
        if len(found) < request.part_of[1]:
            raise SettingsError(
                f"part={request.part}: {name} has {len(found)} samples, fewer than parts"
            )
    if prompts.longest > spec.max_context:
        raise SettingsError(
            f"context_tokens={request.context_tokens}: the longest request has {prompts.longest} "
            f"tokens, the model takes {spec.max_context}; lower --context-tokens or "
            "--max-new-tokens"
        )


def describe(campaign: Campaign) -> dict[str, Any]:
    """Return what the report says about how results came about."""
    versions = installed_versions()
    return {
        "format": "tandemkv-quality/1",
        "command": shlex.join(own_command()),
        "date": datetime.date.today().isoformat(),
        "model": campaign.model_dir.name,
        "dtype": campaign.dtype,
        "device": campaign.device,
        "python": versions.pop("python"),
        "versions": versions,
        "cores": os.cpu_count(),
        "num_layers": campaign.spec.num_layers,
        "num_kv_heads": campaign.spec.num_kv_heads,
        "head_dim": campaign.spec.head_dim,
        "concurrency": campaign.request.concurrency,
        "served": dict(campaign.choice),
        "model_hash": campaign.spec.model_hash,
        **campaign.prompts.corpus,
        "tasks": campaign.prompts.tasks,
    }
