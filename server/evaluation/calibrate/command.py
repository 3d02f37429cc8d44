# SPDX-License-Identifier: Apache-2.0
"""``tandemkv calibrate``: measure a model once, write the files that a policy reads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandemkv.cache_rank.calibration.format import (
    FORMAT_VERSION,
    CalibratedModel,
    Calibration,
    CalibrationError,
    Corpus,
    KascadeCalibration,
    SyncKVCalibration,
    write_calibration,
)
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.index_channels import STEP
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, read_model_spec
from tandemkv.server.evaluation.corpus import Texts, cut_texts
from tandemkv.server.evaluation.request_options import option, takes
from tandemkv.server.evaluation.result_file import check_result_file
from tandemkv.server.evaluation.tokenizing import load_tokenizer
from tandemkv.server.models.calibrated import channels_file, kept_channels, queries_file
from tandemkv.server.settings.launch_settings import EMBEDDED_MODEL

_SHORT_TEXTS, _SHORT_TOKENS = 32, 1000
# Rotation turns some channels so slowly that short texts tell nothing of them (decision record 35).
_LONG_TEXTS, _LONG_TOKENS = 3, 16384
_READ_FOR = {
    "top_k": ("kascade", "sync_kv"),
    "anchors": ("kascade",),
    "clusters": ("sync_kv",),
    "distance": ("look_ahead", None),
}
"""Policies that an option is for; None is what `serve` takes up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of ``tandemkv calibrate``."""

    model: Annotated[str, typer.Argument(help=f"Model directory, or {EMBEDDED_MODEL} (embedded).")]
    policy: Annotated[
        Literal["kascade", "sync_kv", "look_ahead"] | None,
        option("Policy that the file is for, written to --out."),
    ] = None
    index_channels: Annotated[
        int | None,
        option(
            "Instead of --policy: how many channels of each key the index keeps.",
            min=STEP,
            max=1024,
        ),
    ] = None
    out: Annotated[
        Path | None,
        option("File to write, with --policy or --index-channels.", metavar="FILE"),
    ] = None
    text: Annotated[
        list[Path] | None, option("UTF-8 text to read, may be repeated.", metavar="FILE")
    ] = None
    texts: Annotated[
        int | None,
        option("Texts to read. Default 32; 3 for --index-channels.", min=1, max=10000),
    ] = None
    tokens: Annotated[
        int | None,
        option(
            "Tokens of each text. Default 1000; for --index-channels as many as the model takes, "
            f"up to {_LONG_TOKENS}: give as many as requests have, if there is time.",
            min=16,
            max=131072,
        ),
    ] = None
    top_k: Annotated[
        int, option("kascade, sync_kv: size of the sets compared.", min=1, max=4096)
    ] = 64
    anchors: Annotated[int, option("kascade: anchor layers.", "--num-anchors", min=1, max=1024)] = 5
    clusters: Annotated[
        int, option("sync_kv: clusters of KV heads a layer.", "--num-clusters", min=1, max=1024)
    ] = 2
    distance: Annotated[
        int, option("look_ahead: layers from the residual stream to the query.", min=1, max=8)
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        option("Type to compute in. auto: bfloat16 on a GPU, else float32."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option("Where the model runs. auto: a GPU if there is one."),
    ] = "auto"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other, and texts that are too short."""
        if self.policy is not None and self.index_channels is not None:
            raise SettingsError(
                "policy, index_channels: a file is for one; give --policy or --index-channels"
            )
        if self.out is None and not self.is_for_serve:
            raise SettingsError(
                "out: --policy and --index-channels make a file that you name; give --out FILE"
            )
        if self.out is not None and not self.out.parent.is_dir():
            raise SettingsError(
                f"out={self.out}: there is no folder {self.out.parent}; make it, or name another"
            )
        if self.out is not None and self.is_for_serve:
            raise SettingsError(
                "out goes with --policy or --index-channels: without them files are kept where "
                "`tandemkv serve` looks for them"
            )
        if (self.index_channels or 0) % STEP:
            raise SettingsError(
                f"index_channels={self.index_channels} must be a multiple of {STEP}"
            )
        tokens = self.tokens or _SHORT_TOKENS
        if self.policy in ("kascade", "sync_kv") and tokens <= 2 * self.top_k:
            raise SettingsError(
                f"tokens={tokens} must be more than twice top_k={self.top_k}: shorter texts "
                "tell nothing"
            )

    @property
    def is_for_serve(self) -> bool:
        """Whether the files are those that ``serve`` takes up by itself."""
        return self.policy is None and self.index_channels is None


@takes(Request)
def calibrate(request: Request) -> None:
    """Run a model over text, once, so that serve selects faster over long contexts.

    With the model alone two files are kept where `tandemkv serve MODEL` finds them.

    They are projections that predict queries, and the channels of keys that an index has.

    With --policy or --index-channels one file for that is written to --out.

    Without --text the language reference that comes with Python is read.

    Files are for this model only.
    """
    import torch

    from tandemkv.server.checks.preflight import resolve_model
    from tandemkv.server.evaluation.quality.servers import terminable
    from tandemkv.server.plan.devices import resolve_device

    _check_options(request)
    console = Console(stderr=True, highlight=False)
    with console.status(escape(f"looking for {request.model} ...")) as shown:
        model_dir = resolve_model(request.model, shown.update)
    device = resolve_device(request.device)
    if request.dtype == "auto":  # all scores of long texts, in float32, fill a GPU
        request = replace(request, dtype="bfloat16" if device == "cuda" else "float32")
    with torch.device(device), terminable():  # what is half written is removed then, too
        try:
            for path, summary in _calibrate(model_dir, request, console):
                console.print(f"[green]ok[/]  {escape(f'{path}: {summary}')}", soft_wrap=True)
        except torch.OutOfMemoryError as error:
            smaller = "" if request.dtype == "bfloat16" else "--dtype bfloat16, "
            raise CalibrationError(
                f"device={device}: not enough memory for dtype={request.dtype}; use {smaller}"
                "shorter --tokens, or --device cpu"
            ) from error


def _check_options(request: Request) -> None:
    """Refuse options that would not be read, and a file that cannot be written."""
    for field in fields(request):
        given, policies = getattr(request, field.name), _READ_FOR.get(field.name)
        if policies is None or given == field.default:
            continue
        if request.index_channels is not None or request.policy not in policies:
            named = " or ".join(f"--policy {policy}" for policy in policies if policy)
            raise SettingsError(
                f"{field.name}={given} is not read for what is asked; leave it out, or give {named}"
            )
    if request.out is not None:
        check_result_file(request.out, "--out")


def _calibrate(model_dir: Path, request: Request, console: Console) -> Iterator[tuple[Path, str]]:
    """Write each file that is asked for, and yield it with what was found."""
    if request.is_for_serve:
        yield from calibrate_for_serve(model_dir, request, console)
        return
    assert request.out is not None
    if request.index_channels is not None:
        write = find_channels
    else:
        write = fit_queries if request.policy == "look_ahead" else choose_heads
    yield request.out, write(model_dir, request, request.out, console)


def calibrate_for_serve(
    model_dir: Path, request: Request, console: Console
) -> Iterator[tuple[Path, str]]:
    """Keep what ``serve`` takes up (`with_calibration`); yields each file and what was found.

    A file is replaced once the new one is whole. Raises as `fit_queries` and `find_channels` do.
    """
    spec = read_model_spec(model_dir, dtype=request.dtype)
    queries, channels = queries_file(spec, request.distance), channels_file(spec)
    part = queries.with_name(f"part-{os.getpid()}.safetensors")
    try:
        queries.parent.mkdir(parents=True, exist_ok=True)
        part.touch()  # what is refused here the model is not run for
    except OSError as error:
        raise CalibrationError(
            f"{queries.parent}: cannot be written to ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder that can"
        ) from error
    try:
        of_policy = replace(request, policy="look_ahead", out=part)
        summary = fit_queries(model_dir, of_policy, part, console)
        yield part.replace(queries), summary
        gc.collect()  # its model: hooks refer to who reads them
        count = kept_channels(spec.head_dim)
        if count is not None:
            of_index = replace(request, index_channels=count, out=part)
            summary = find_channels(model_dir, of_index, part, console)
            yield part.replace(channels), summary
    finally:
        part.unlink(missing_ok=True)


def fit_queries(model_dir: Path, request: Request, out: Path, console: Console) -> str:
    """Write the projections that predict queries, and return how well they do.

    Raises `CalibrationError` as `choose_heads` does, or if the model's queries cannot be fitted.
    """
    from tandemkv.cache_rank.protocol.models.fitted_queries import write_fitted_queries

    from .look_ahead import QueryMeasurement

    spec, corpus = _for_safetensors(model_dir, request, out)
    measurement = QueryMeasurement(model_dir, spec, dtype=request.dtype, distance=request.distance)
    for text in _shown(corpus.tokens, model_dir, console):
        measurement.add(text)
    with console.status("fitting ..."):
        found = measurement.result()
    about = _about(model_dir, corpus)
    layers = {layer: (fit.weight, fit.bias) for layer, fit in found.items()}
    write_fitted_queries(out, spec, request.distance, layers, about)
    own = sum(fit.own for fit in found.values()) / len(found)
    fitted = sum(fit.fitted for fit in found.values()) / len(found)
    return f"{own:.1%} of the queries' variance is missed with W_q, {fitted:.1%} with the file"


def find_channels(model_dir: Path, request: Request, out: Path, console: Console) -> str:
    """Write the channels of keys that an index should have, and return how much they tell.

    Raises `CalibrationError` as `choose_heads` does, or if keys have no more channels.
    """
    from tandemkv.cache_rank.protocol.models.index_channels import write_index_channels

    from .index_channels import ChannelMeasurement

    count = request.index_channels or 0
    spec, corpus = _for_safetensors(model_dir, request, out)
    if count >= spec.head_dim:
        raise CalibrationError(
            f"index_channels={count}: keys of {model_dir.name} have {spec.head_dim}; give "
            "fewer, or serve without a file"
        )
    measurement = ChannelMeasurement(model_dir, spec, dtype=request.dtype)
    for text in _shown(corpus.tokens, model_dir, console):
        measurement.add(text)
    found = measurement.result(count)
    layers = {layer: kept.channels for layer, kept in found.items()}
    write_index_channels(out, spec, layers, _about(model_dir, corpus))
    share = sum(kept.share for kept in found.values()) / len(found)
    return f"{count} of {spec.head_dim} channels make {share:.1%} of the variance of scores"


def _for_safetensors(model_dir: Path, request: Request, out: Path) -> tuple[ModelSpec, Texts]:
    """Return as `_spec_and_texts`; a file beside the model's own is refused."""
    if out.parent.resolve() == model_dir.resolve():
        raise CalibrationError(
            f"out={out}: every safetensors file beside a model is taken for its weights; "
            "write it into another folder"
        )
    return _spec_and_texts(model_dir, request)


def _about(model_dir: Path, corpus: Texts) -> dict[str, str]:
    return {
        "model_id": model_dir.name,
        "sources": ", ".join(corpus.sources),
        "num_tokens": str(sum(map(len, corpus.tokens))),
    }


def choose_heads(model_dir: Path, request: Request, out: Path, console: Console) -> str:
    """Write kascade's anchors or sync_kv's clusters, and return what they are.

    Raises `CalibrationError` if the model takes no text of that length, or there is none;
    `UnsupportedModelError` if its attention cannot be served.
    """
    from .attention import AttentionRecorder, max_of_group, mean_of_group
    from .kascade import KascadeMeasurement
    from .sync_kv import SyncKVMeasurement

    spec, corpus = _spec_and_texts(model_dir, request)
    is_kascade = request.policy == "kascade"
    pool = mean_of_group if is_kascade else max_of_group
    measurement = (KascadeMeasurement if is_kascade else SyncKVMeasurement)(request.top_k)
    recorder = AttentionRecorder(model_dir, spec, dtype=request.dtype, pool=pool)
    for tokens in _shown(corpus.tokens, model_dir, console):
        measurement.add(recorder.read(tokens))
    if isinstance(measurement, KascadeMeasurement):
        for tokens in _shown(corpus.tokens, model_dir, console):
            measurement.weigh(recorder.read(tokens))
    found = measurement.result(request.anchors if is_kascade else request.clusters)
    calibration = Calibration(
        version=FORMAT_VERSION,
        source="measured",
        model=CalibratedModel.of(spec, model_dir.name),
        corpus=Corpus(
            sources=corpus.sources,
            num_texts=len(corpus.tokens),
            num_tokens=sum(map(len, corpus.tokens)),
        ),
        policy="kascade" if is_kascade else "sync_kv",
        kascade=found if isinstance(found, KascadeCalibration) else None,
        sync_kv=found if isinstance(found, SyncKVCalibration) else None,
    )
    write_calibration(calibration, out)
    if isinstance(found, KascadeCalibration):
        return "anchors " + ",".join(map(str, found.anchors))
    return f"{max(map(len, found.representatives))} clusters a layer"


def _shown(
    texts: Sequence[list[int]], model_dir: Path, console: Console
) -> Iterator[Sequence[int]]:
    """Yield the texts, with a bar that says how many have been read."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        yield from progress.track(texts, description=f"reading with {model_dir.name}")


def _spec_and_texts(model_dir: Path, request: Request) -> tuple[ModelSpec, Texts]:
    """Return what the model is, and the texts to read; raises as `choose_heads` does."""
    spec = read_model_spec(model_dir, dtype=request.dtype)
    if spec.linear_layers:
        instead = "without look_ahead.predictor" if request.policy == "look_ahead" else "--anchors"
        raise CalibrationError(
            f"model={model_dir.name}: calibration reads the attention of every layer, and "
            f"{len(spec.linear_layers)} of {spec.num_layers} are linear attention; use `tandemkv "
            f"serve` {instead}"
        )
    if request.policy == "kascade" and spec.other_layers:
        raise CalibrationError(
            f"model={model_dir.name}: {len(spec.other_layers)} of {spec.num_layers} layers see a "
            "window alone, and anchors are chosen among all; use `tandemkv serve --anchors` with "
            "layers of full attention"
        )
    num_texts, num_tokens = _SHORT_TEXTS, _SHORT_TOKENS
    if request.index_channels is not None:
        num_texts, num_tokens = _LONG_TEXTS, min(_LONG_TOKENS, spec.max_context)
    num_tokens = request.tokens or num_tokens
    if num_tokens > spec.max_context:
        raise CalibrationError(f"tokens={num_tokens}: the model takes {spec.max_context} at most")
    corpus = cut_texts(
        request.text or (),
        load_tokenizer(model_dir),
        num_texts=request.texts or num_texts,
        num_tokens=num_tokens,
    )
    return spec, corpus
