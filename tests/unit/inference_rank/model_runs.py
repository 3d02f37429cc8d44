# SPDX-License-Identifier: Apache-2.0
"""Run tiny models through SGLang's ModelRunner on a CPU, without servers; a program of its own.

    FOLDER NAME... [--cache-rank NAME...] [--adapter NAME] [--ways FILE]

Such lines are read from standard input, until it ends. Each is done in a copy of this process, and
answered with the line ``exit code N``; what it prints is in ``FOLDER/program.log``.

``FOLDER/models/NAME`` are models. Each is run by SGLang's own backend and by ours, each time in a
copy of this process: importing SGLang takes many seconds, and its state is global. What was found
is ``FOLDER/NAME-MODE.safetensors``, and what was printed ``FOLDER/NAME-MODE.log``. Models behind
``--cache-rank`` are also run with a cache rank in a process of its own, for
``FOLDER/NAME-two.safetensors``. The one behind ``--adapter`` is also run with the LoRA adapter
``FOLDER/adapter`` beside it, for ``FOLDER/NAME-MODE-adapter.safetensors``; the longer prompt names
it if no queries are predicted. The file behind ``--ways`` has trees of settings by their names; the
first model is run with each of them, for ``FOLDER/NAME-WAY.safetensors``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import adapters_without_a_gpu
import linear_without_a_gpu
import quantised_without_a_gpu
import sglang_without_a_gpu
import torch
from safetensors.torch import save_file
from sglang.benchmark import one_batch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models import registry
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs
from tiny_models import LENGTHS, MODES, STEPS, prompts

from tandemkv.cache_rank.engine import factory
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.models.predictor_weights import MappedPredictor, put_weights
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
)
from tandemkv.inference_rank import runtime
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.sglang import hooks
from tandemkv.inference_rank.sglang.contract import check_contract
from tandemkv.inference_rank.start import local
from tandemkv.server.settings.launch_settings import ServeSettings

_WARM = (hooks, local, factory, ModelConfig, registry)
"""Imported before the copies are made."""
CAPACITY = 2048
SELECTION = {
    "budget_tokens": 96, "resident_factor": 1.0, "num_recent_tokens": 16, "fetch_cap": 96,
    "exact_layers": [], "sample_tokens": 0,
}  # fmt: skip
"""The shorter prompt fits into the resident set and the ring, the longer one does not."""
_LIMIT_S, _ALL_LIMIT_S = 120, 500
COUNTED = ("slow_rows_total", "attended_tokens_total", "selections_total", "fetched_rows_total")
"""What is in ``counts``, in this order; -1 for what another process counts."""

Seen = list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]


def server_args(model: Path, backend: str, **more: Any) -> Any:
    return ServerArgs(
        model_path=str(model), attention_backend=backend, device="cpu", dtype="float32",
        max_total_tokens=CAPACITY, max_running_requests=4, chunked_prefill_size=CAPACITY,
        disable_cuda_graph=True, disable_overlap_schedule=True, sampling_backend="pytorch",
        grammar_backend="none", skip_tokenizer_init=True, disable_hybrid_swa_memory=True, **more,
    )  # fmt: skip


def settings_of(model: Path, selection: dict[str, Any], **more: Any) -> ServeSettings:
    """Return what a launcher would be told; `selection` is laid over `SELECTION`."""
    return ServeSettings.model_validate(
        {
            "model": str(model), "device": "cpu", "dtype": "float32", "cache_ranks": 0,
            "selection": SELECTION | selection, "max_running_requests": 4,
            "cache": {"capacity_tokens": CAPACITY}, "sglang_args": ["--skip-tokenizer-init"],
            **more,
        }
    )  # fmt: skip


def hand_over(settings: ServeSettings, folder: Path) -> None:
    """Set what a launcher would."""
    os.environ[SETTINGS_VARIABLE] = settings.rank_settings.model_dump_json()
    os.environ[RUN_DIR_VARIABLE] = str(RunDir.create(folder).path)


def load_the_plugin() -> None:
    """Load it into SGLang; `hand_over` comes first."""
    os.environ["SGLANG_PLUGINS"] = "tandemkv"
    load_plugins()


def watch(seen: Seen) -> list[LiveQueryPredictor]:
    """Note what is predicted, in order: layer, stream, positions, query."""
    predict, made = LiveQueryPredictor.__call__, []

    def call(
        self: LiveQueryPredictor, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        query = predict(self, layer, hidden, positions)
        made[:] = [self]
        seen.append((layer, hidden.clone(), positions.clone(), query.clone()))
        return query

    LiveQueryPredictor.__call__ = call  # type: ignore[method-assign]
    return made


def run(model: Path, mode: str, out: Path, adapter: Path | None = None) -> None:
    """Run a model with the engine, if there is one, in this process."""
    seen: Seen = []
    policy = MODES[mode]
    if policy:
        hand_over(settings_of(model, {"policy": policy}), out.with_suffix(".run"))
    predictors = watch(seen) if policy else []
    backend, predicts = "tandemkv" if policy else "torch_native", mode == "sparse"
    found = decode(model, backend, started=seen.clear, adapter=adapter, names_it=not predicts)
    if predictors:
        found |= predictions(predictors[0], seen)
    save_file({name: value.contiguous() for name, value in found.items()}, out)


@torch.no_grad()
def decode(
    model: Path,
    backend: str,
    started: Callable[[], None] = lambda: None,
    *,
    adapter: Path | None = None,
    names_it: bool = False,
) -> dict[str, torch.Tensor]:
    """Decode both prompts together, greedily; `started` is called behind the start.

    With `names_it` the longer one, which is the second, is of the adapter that is loaded.
    """
    more = {} if adapter is None else adapters_without_a_gpu.arguments(adapter)
    args = server_args(model, backend, **more)
    one_batch._set_envs_and_config(args)
    one_batch.get_tokenizer = lambda *_, **__: None
    if hasattr(one_batch, "publish"):  # newer versions of SGLang leave that to the caller
        ranks = one_batch.SpawnRanks(world_rank=0, gpu_id=0)
        one_batch.publish(args, role="scheduler", ranks=ranks)
    bench, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    started()
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(LENGTHS), 0, prompts())
    if adapter is not None and names_it:
        requests[1].lora_id = args.lora_paths[0].lora_id
    token, logits, batch = bench.extend(requests)
    tokens, all_logits = [token], [logits]
    for _ in range(STEPS):
        token, logits = bench.decode(token, batch)
        tokens.append(token)
        all_logits.append(logits)
    found = {"tokens": torch.stack(tokens), "logits": torch.stack(all_logits).float()}
    if runtime.current() is not None:
        counters = runtime.current().counters
        rows = [counters.dense_rows_total, counters.sparse_rows_total, counters.exact_rows_total]
        found["rows"] = torch.tensor(rows)
        values = runtime.current().status().values
        found["counts"] = torch.tensor([int(values.get(name, -1)) for name in COUNTED])
    return found


def run_with_adapter(model: Path, mode: str, out: Path) -> None:
    """Run a model with a LoRA adapter beside it."""
    adapters_without_a_gpu.install()
    run(model, mode, out, out.parent / "adapter")


def run_way(model: Path, tree: dict[str, Any], out: Path) -> None:
    """Run a model with the engine in this process, as a tree of settings says."""
    is_loaded = RUN_DIR_VARIABLE in os.environ
    hand_over(settings_of(model, **tree), out.with_suffix(".run"))
    if not is_loaded:
        load_the_plugin()
    save_file(decode(model, "tandemkv"), out)


def run_with_cache_rank(model: Path, out: Path) -> None:
    """Run a model sparsely with the engine in a process of its own."""
    settings = settings_of(model, {"policy": MODES["sparse"]}, cache_ranks=1)
    hand_over(settings, out.with_suffix(".run"))
    config = out.with_suffix(".json")
    config.write_text(settings.model_dump_json(exclude_defaults=True))
    command = [sys.executable, "-P", "-m", "tandemkv.server", "cache-rank"]
    command += ["--run-dir", os.environ[RUN_DIR_VARIABLE], "--config", str(config)]
    rank = subprocess.Popen(command)
    try:
        load_the_plugin()
        save_file(decode(model, "tandemkv"), out)
    finally:
        rank.kill()
        rank.wait()


def predictions(predictor: LiveQueryPredictor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return what was predicted, and what the two other ways predict of the same streams."""
    mapped = MappedTensors()
    put_weights(mapped, *predictor.weights())
    num_heads = mapped["predict_weight"].shape[1] // int(mapped["predict_form"][0])
    elsewhere = MappedPredictor(mapped, len(predictor._layers), num_heads)
    by_modules = [predictor._layers[layer].call(h.clone(), at) for layer, h, at, _ in seen]
    layers = predictor._layers
    weights = [layer.weight for layer in layers if layer is not None]
    return {
        "weights": torch.stack(weights),
        "layers": torch.tensor([layer for layer, *_ in seen]),
        "streams": torch.stack([hidden for _, hidden, _, _ in seen]),
        "positions": torch.stack([at.long() for _, _, at, _ in seen]),
        "live": torch.stack([query for *_, query in seen]),
        "mapped": torch.stack([elsewhere(layer, h, at).clone() for layer, h, at, _ in seen]),
        "by_modules": torch.stack(by_modules),
    }


def in_copy(log: Path, work: Callable[[], None], limit_s: int = _LIMIT_S) -> int:
    """Fork, and wait for the exit code; what fails leaves what it printed in `log`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGALRM, _too_long)  # raises, so that a cache rank is ended too
    signal.alarm(limit_s)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # past SGLang's threads


def _too_long(*_: Any) -> None:
    raise TimeoutError("it takes too long")


def read_line(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cache-rank", nargs="*", default=[])
    parser.add_argument("--adapter")
    parser.add_argument("--ways", type=Path)
    return parser.parse_args(shlex.split(line))


def do(given: argparse.Namespace) -> None:
    """Run every model in every mode, and some also in another way."""
    folder, models = given.folder, given.folder / "models"

    def copy(out: str, work: Callable[..., None], *arguments: Any) -> None:
        path = folder / f"{out}.safetensors"
        in_copy(path.with_suffix(".log"), partial(work, *arguments, path))

    server_args(models / given.names[0], "torch_native")  # and what SGLang's start does
    ways = json.loads(given.ways.read_text()) if given.ways else {}
    for name in given.cache_rank:  # each loads the plugin for itself
        copy(f"{name}-two", run_with_cache_rank, models / name)
    for way in [way for way, tree in ways.items() if "transport" in tree]:  # and so do these
        copy(f"{given.names[0]}-{way}", run_way, models / given.names[0], ways.pop(way))
    for mode, policy in MODES.items():
        if policy and RUN_DIR_VARIABLE not in os.environ:  # from here on with the plugin
            hand_over(settings_of(models / given.names[0], {"policy": policy}), folder / "run")
            load_the_plugin()
        for name in given.names:
            copy(f"{name}-{mode}", run, models / name, mode)
        if given.adapter is not None:
            model = models / given.adapter
            copy(f"{given.adapter}-{mode}-adapter", run_with_adapter, model, mode)
    for way, tree in ways.items():
        copy(f"{given.names[0]}-{way}", run_way, models / given.names[0], tree)


def main() -> None:
    """Do each line of standard input."""
    sglang_without_a_gpu.install()
    linear_without_a_gpu.install()
    quantised_without_a_gpu.install()
    check_contract()  # imports all that the plugin does
    for line in sys.stdin:
        given = read_line(line)
        code = in_copy(given.folder / "program.log", partial(do, given), _ALL_LIMIT_S)
        print(f"exit code {code}", flush=True)  # `program_runs.ANSWER`


if __name__ == "__main__":
    main()
