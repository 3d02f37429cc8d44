# SPDX-License-Identifier: Apache-2.0
"""``tandemkv calibrate``: measure a model once, write the file that a policy reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandemkv.cache_rank.calibration.format import (
    FORMAT_VERSION,
    CalibratedModel,
    Calibration,
    CalibrationError,
    Corpus,
    write_calibration,
)
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.model_spec import read_model_spec
from tandemkv.server.preflight import resolve_model
from tandemkv.server.settings import EMBEDDED_MODEL

Method = Literal["kascade", "sync_kv"]
METHODS = get_args(Method)
_DTYPES = ("float32", "bfloat16")


def calibrate(
    model: Annotated[str, typer.Argument(help=f"Model directory, or {EMBEDDED_MODEL} (embedded).")],
    policy: Annotated[str, typer.Option("--policy", metavar="|".join(METHODS), help="For whom.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text to read, may be repeated."),
    ] = None,
    texts: Annotated[int, typer.Option("--texts", min=1, max=10000, help="Texts to read.")] = 32,
    tokens: Annotated[
        int, typer.Option("--tokens", min=16, max=65536, help="Tokens of each text.")
    ] = 1000,
    top_k: Annotated[
        int, typer.Option("--top-k", min=1, max=4096, help="Size of the sets compared.")
    ] = 64,
    anchors: Annotated[
        int, typer.Option("--num-anchors", min=1, max=1024, help="kascade: anchor layers.")
    ] = 5,
    clusters: Annotated[
        int, typer.Option("--num-clusters", min=1, max=1024, help="sync_kv: N_r.")
    ] = 2,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="|".join(_DTYPES), help="To compute in.")
    ] = "float32",
) -> None:
    """Run a model over text on the CPU, and write a calibration file for a policy.

    Without --text the reference that Python carries is read. The file is for this model only.
    """
    for name, value, allowed in (("policy", policy, METHODS), ("dtype", dtype, _DTYPES)):
        if value not in allowed:
            raise SettingsError(f"{name}={value} must be one of {', '.join(allowed)}")
    if tokens <= 2 * top_k:
        raise SettingsError(
            f"tokens={tokens} must be more than twice top_k={top_k}: shorter texts tell nothing"
        )
    console = Console(stderr=True, highlight=False)
    with console.status(f"looking for {model} ...") as shown:
        model_dir = resolve_model(model, shown.update)
    found = measure(
        model_dir,
        "kascade" if policy == "kascade" else "sync_kv",
        model_id=model_dir.name,
        files=text or [],
        num_texts=texts,
        num_tokens=tokens,
        top_k=top_k,
        size=anchors if policy == "kascade" else clusters,
        dtype=dtype,
        console=console,
    )
    write_calibration(found, out)
    console.print(f"[green]ok[/]  {out}: {_summary(found)}")


def measure(
    model_dir: Path,
    policy: Method,
    *,
    model_id: str,
    files: list[Path],
    num_texts: int,
    num_tokens: int,
    top_k: int,
    size: int,
    dtype: str,
    console: Console,
) -> Calibration:
    """Run the model and return its calibration.

    Parameters
    ----------
    size : int
        Anchors for kascade, clusters for sync_kv.

    Raises
    ------
    CalibrationError
        If there is no text of that length.
    UnsupportedModelError
        If the model's attention cannot be served.
    """
    from transformers import AutoTokenizer

    from .attention import AttentionRecorder, max_of_group, mean_of_group
    from .corpus import read_corpus
    from .kascade import KascadeMeasurement
    from .sync_kv import SyncKVMeasurement

    spec = read_model_spec(model_dir, dtype=dtype)
    if num_tokens > spec.max_context:
        raise CalibrationError(f"tokens={num_tokens}: the model takes {spec.max_context} at most")
    corpus = read_corpus(
        files, AutoTokenizer.from_pretrained(model_dir), num_texts=num_texts, num_tokens=num_tokens
    )
    pool = mean_of_group if policy == "kascade" else max_of_group
    recorder = AttentionRecorder(model_dir, spec, dtype=dtype, pool=pool)
    kascade, sync_kv = KascadeMeasurement(top_k), SyncKVMeasurement(top_k)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for tokens in progress.track(corpus.tokens, description=f"reading with {model_id}"):
            seen = recorder.read(tokens)
            if policy == "kascade":
                kascade.add(seen.weights, seen.importance)
            else:
                sync_kv.add(seen.weights)
    return Calibration(
        version=FORMAT_VERSION,
        policy=policy,
        source="measured",
        model=CalibratedModel.of(spec, model_id),
        corpus=Corpus(
            sources=corpus.sources,
            num_texts=len(corpus.tokens),
            num_tokens=sum(len(tokens) for tokens in corpus.tokens),
        ),
        kascade=kascade.result(size) if policy == "kascade" else None,
        sync_kv=sync_kv.result(size) if policy == "sync_kv" else None,
    )


def _summary(found: Calibration) -> str:
    if found.kascade is not None:
        return "anchors " + ",".join(str(layer) for layer in found.kascade.anchors)
    assert found.sync_kv is not None
    return f"{max(len(row) for row in found.sync_kv.representatives)} clusters a layer"
