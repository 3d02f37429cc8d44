# SPDX-License-Identifier: Apache-2.0
"""Run tiny models through SGLang's ModelRunner on a CPU, without servers; a program of its own.

    python model_runs.py FOLDER NAME...
    python model_runs.py FOLDER --cache-rank NAME
    python model_runs.py FOLDER --adapter NAME

``FOLDER/models/NAME`` are models. Each is run by SGLang's own backend and by ours, each time in a
copy of this process: importing SGLang takes many seconds, and its state is global. What was found
is ``FOLDER/NAME-MODE.safetensors``, and what was printed ``FOLDER/NAME-MODE.log``. The second form
runs one model with a cache rank in a process of its own, for ``FOLDER/NAME-two.safetensors``. The
third loads the LoRA adapter ``FOLDER/adapter`` beside a model, for
``FOLDER/NAME-MODE-adapter.safetensors``; the longer prompt names it if no queries are predicted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters_without_a_gpu
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
from tandemkv.cache_rank.protocol.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.predictor_weights import MappedPredictor, put_weights
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import RUN_DIR_VARIABLE, SETTINGS_VARIABLE
from tandemkv.inference_rank import hooks, runtime
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.sglang_contract import check_contract
from tandemkv.inference_rank.start import local
from tandemkv.server.settings import ServeSettings

_WARM = (hooks, local, factory, ModelConfig, registry)
"""Imported before the copies are made."""
CAPACITY = 2048
SELECTION = {
    "budget_tokens": 96, "resident_factor": 1.0, "num_recent_tokens": 16, "fetch_cap": 96,
    "exact_layers": [], "sample_tokens": 0,
}  # fmt: skip
"""The shorter prompt fits into the resident set and the ring, the longer one does not."""
_LIMIT_S = 120

Seen = list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]


def server_args(model: Path, backend: str, **more: Any) -> Any:
    return ServerArgs(
        model_path=str(model), attention_backend=backend, device="cpu", dtype="float32",
        max_total_tokens=CAPACITY, max_running_requests=4, chunked_prefill_size=CAPACITY,
        disable_cuda_graph=True, disable_overlap_schedule=True, sampling_backend="pytorch",
        grammar_backend="none", skip_tokenizer_init=True, disable_hybrid_swa_memory=True, **more,
    )  # fmt: skip


def settings_of(model: Path, policy: str, cache_ranks: int = 0) -> ServeSettings:
    """Return what a launcher would be told."""
    return ServeSettings.model_validate(
        {
            "model": str(model), "device": "cpu", "dtype": "float32", "cache_ranks": cache_ranks,
            "selection": {**SELECTION, "policy": policy}, "max_running_requests": 4,
            "cache": {"capacity_tokens": CAPACITY}, "sglang_args": ["--skip-tokenizer-init"],
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
        hand_over(settings_of(model, policy), out.with_suffix(".run"))
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
    return found


def run_with_cache_rank(model: Path, out: Path) -> None:
    """Run a model sparsely with the engine in a process of its own."""
    settings = settings_of(model, MODES["sparse"], cache_ranks=1)
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
    elsewhere = MappedPredictor(mapped, len(predictor._layers))
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


def run_in_copy(model: Path, mode: str, out: Path, adapter: Path | None = None) -> None:
    """Fork, and wait; what fails leaves no file but its log."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    signal.alarm(_LIMIT_S)
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run(model, mode, out, adapter)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """Run every model in every mode, or one with a cache rank."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    sglang_without_a_gpu.install()
    quantised_without_a_gpu.install()
    check_contract()  # imports all that the plugin does
    if names[0] == "--cache-rank":
        run_with_cache_rank(folder / "models" / names[1], folder / f"{names[1]}-two.safetensors")
        os._exit(0)  # past SGLang's threads, which wait for the other process
    adapter = folder / "adapter" if names[0] == "--adapter" else None
    names, end = (names, "") if adapter is None else (names[1:], "-adapter")
    if adapter is not None:
        adapters_without_a_gpu.install()
    server_args(folder / "models" / names[0], "torch_native")  # and what SGLang's start does
    for mode, policy in MODES.items():
        if policy and RUN_DIR_VARIABLE not in os.environ:  # from here on with the plugin
            hand_over(settings_of(folder / "models" / names[0], policy), folder / "run")
            load_the_plugin()
        for name in names:
            out = folder / f"{name}-{mode}{end}.safetensors"
            run_in_copy(folder / "models" / name, mode, out, adapter)


if __name__ == "__main__":
    main()
