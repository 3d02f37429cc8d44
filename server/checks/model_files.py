# SPDX-License-Identifier: Apache-2.0
"""Whether a model directory is complete, read from headers alone, before a process is started.

SGLang finds most of this out too, after half a minute and with a traceback, and some of it not at
all: weights that a checkpoint lacks keep whatever was in memory. Only what is certainly wrong is
refused. Files are checked in every layout; names and shapes of tensors only in Hugging Face's
unquantised layout of the supported architectures, and there only those that are present. Of a
quantised model it is checked whether queries can be predicted from its weights.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.weight_formats import read_weight_format
from tandemkv.inference_rank.weights.query_checkpoint import (
    LOADED_FROM_SAFETENSORS,
    WITHOUT_PREDICTION,
    QueryCheckpoint,
)
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sglang_args import value_of

from .tensor_shapes import check_shapes

INDEX = "model.safetensors.index.json"
_CHECKED_FORMATS = (None, "auto", "safetensors", "fastsafetensors")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MAX_JSON_BYTES = 256 << 20
"""An index of a million tensors has a fifth of it."""
_MAX_NAMED = 3
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_COPY_AGAIN = "copy or download the file again"


class ModelFilesError(UnsupportedModelError):
    """A file of the model is missing, damaged, or does not fit ``config.json``."""


def check_weights_path(path: Path, what: str) -> None:
    """Refuse a folder of weights that SGLang would take for a pattern, and find nothing.

    Raises `SettingsError`; `what` names the folder as the user gave it.
    """
    if glob.escape(str(path)) != str(path):
        raise SettingsError(
            f"{what}: SGLang takes *, ? and [ in a path for a pattern, and would find no weights "
            f"in {path}; rename the directories whose names have them"
        )


def check_model_files(
    model_dir: Path, config: Mapping[str, Any], sglang_args: Sequence[str] = ()
) -> None:
    """Check the weights and the tokenizer of a model without reading a weight.

    Weights are not checked with a ``--load-format`` in `sglang_args` other than ``auto`` and
    ``safetensors``, shapes not with ``--json-model-override-args``. Raises `ModelFilesError`,
    naming the file, what is wrong with it, and what to do.
    """
    if value_of(sglang_args, "--load-format") in _CHECKED_FORMATS:
        shapes, files = _read_headers(model_dir)
        overridden = value_of(sglang_args, "--json-model-override-args") is not None
        if not overridden and not _is_quantised(model_dir, config):
            try:
                check_shapes(shapes, config)
            except ValueError as error:
                raise ModelFilesError(_with_file(model_dir, files, error)) from error
    _check_json(model_dir / "generation_config.json")
    if value_of(sglang_args, "--skip-tokenizer-init") is None:
        given = value_of(sglang_args, "--tokenizer-path")
        directory = model_dir if given is None else Path(given).expanduser()
        if given is None or directory.is_dir():
            check_tokenizer(directory)


def check_tokenizer(directory: Path) -> None:
    """Check that a tokenizer is there, and that its ``tokenizer.json``, if any, can be loaded.

    Raises `ModelFilesError`, naming the file.
    """
    config = _check_json(directory / "tokenizer_config.json")
    present = [name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not present and not list(directory.glob("*.tiktoken")) and "auto_map" not in config:
        raise ModelFilesError(
            f"model={directory}: no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy the "
            "tokenizer's files of the model into it, or name their folder with "
            "`-- --tokenizer-path DIR`"
        )
    for name in present:
        if not (directory / name).stat().st_size:
            raise ModelFilesError(f"{directory / name}: the file is empty; {_COPY_AGAIN}")
    if "tokenizer.json" in present:
        _load_tokenizer(directory / "tokenizer.json")


def _load_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFilesError(
            f"{path}: not a tokenizer that the tokenizers library reads ({_one_line(error)}); "
            f"{_COPY_AGAIN}"
        ) from error


def weight_bytes(model_dir: Path) -> int:
    """Return the bytes of the safetensors files that SGLang would load; 0 where there are none.

    Files that are missing count nothing. Raises `ModelFilesError` if the index cannot be read.
    """
    if not any(model_dir.glob("*.safetensors")):
        return 0  # weights of another format are not counted
    _, files = _files_to_load(model_dir)
    return sum((model_dir / name).stat().st_size for name in files if (model_dir / name).is_file())


def _files_to_load(model_dir: Path) -> tuple[dict[str, str] | None, list[str]]:
    """Return the index's file of each tensor, if there is an index, and all files' names."""
    index = model_dir / INDEX
    weight_map = _read_weight_map(index) if index.is_file() else None
    if weight_map is None:
        return None, _files_without_index(model_dir)
    return weight_map, sorted({*weight_map.values()})


def _read_headers(model_dir: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return shapes, and names of files, of the tensors of all files that SGLang would load."""
    weight_map, files = _files_to_load(model_dir)
    missing = [name for name in files if not (model_dir / name).is_file()]
    if missing:
        source = INDEX if weight_map is not None else "the names of the other shards"
        raise ModelFilesError(
            f"{model_dir / missing[0]}: the file is missing ({len(missing)} of {len(files)} files "
            f"that {source} asks for: {_some(missing)}); finish the copy or download of the model"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    for name in files:
        found = _read_header(model_dir / name)
        shapes |= found
        places |= dict.fromkeys(found, name)
    for tensor, name in (weight_map or {}).items():
        if tensor not in shapes:
            raise ModelFilesError(
                f"{model_dir / name}: lacks the tensor {tensor} that {INDEX} places in it; index "
                "and weights are of different models, copy or download both again"
            )
    return shapes, places


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _check_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{index}: it has no weight_map with files; {_COPY_AGAIN}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise ModelFilesError(
                f"{index}: weight_map[{tensor!r}]={name!r} must be the name of a file beside it; "
                f"{_COPY_AGAIN}"
            )
    return weight_map


def _files_without_index(model_dir: Path) -> list[str]:
    """Return the files that SGLang loads where no index names them, missing shards included."""
    found = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if not found:
        raise ModelFilesError(_no_safetensors(model_dir))
    if len(found) == 2 and found == ["consolidated.safetensors", "model.safetensors"]:
        return found[1:]
    shards = {
        f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors"
        for match in filter(None, map(_SHARD.fullmatch, found))
        for number in range(1, int(match["count"]) + 1)
    }
    return sorted({*found, *shards})


def _no_safetensors(model_dir: Path) -> str:
    pickled = sorted(
        path.name for suffix in ("bin", "pt", "pth") for path in model_dir.glob(f"*.{suffix}")
    )
    if pickled:
        return (
            f"model={model_dir}: its weights are pickled ({_some(pickled)}), and reading a pickle "
            "can run code that is in it; convert them to safetensors where you trust them "
            "(transformers: from_pretrained, then save_pretrained), or name the format with "
            "`-- --load-format FORMAT`, which is passed on unchecked"
        )
    return (
        f"model={model_dir}: no weights (*.safetensors) in it; finish the copy or download of the "
        "model, or give another directory"
    )


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors; the library also compares sizes with its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            is_pointer = b"git-lfs" in file.read(64)
        what = (
            "a Git LFS pointer, not the weights; run `git lfs pull` in the model's directory"
            if is_pointer
            else f"no whole safetensors file of {path.stat().st_size} bytes ({_one_line(error)}); "
            f"{_COPY_AGAIN}"
        )
        raise ModelFilesError(f"{path}: {what}") from error


def _check_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"larger than {_MAX_JSON_BYTES >> 20} MiB")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelFilesError(
            f"{path}: no readable JSON ({_one_line(error)}); {_COPY_AGAIN}"
        ) from error
    return found


def _is_quantised(model_dir: Path, config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config") or config.get("compression_config")) or any(
        (model_dir / name).is_file() for name in _QUANTISATION_FILES
    )


def _with_file(model_dir: Path, files: Mapping[str, str], error: ValueError) -> str:
    """Put the file before a message of `check_shapes` that is about one tensor."""
    message, *names = error.args
    file = files.get(names[0] if names else "", "config.json")
    return (
        f"{model_dir / file}: {message}; config.json and weights are of different models, or the "
        "checkpoint is incomplete: copy or download both again"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_query_weights(
    settings: ServeSettings, model_dir: Path, config: Mapping[str, Any]
) -> None:
    """Refuse a quantised model whose ``W_q`` cannot be read, if the policy predicts queries.

    The headers of a quantised checkpoint are read, no weight. Raises `SettingsError` if an argument
    makes SGLang's modules unreadable, `UnsupportedModelError` with the format, the reason and what
    to do.
    """
    if not settings.selection.declared.predicts_from_hidden:
        return
    arguments, policy = settings.sglang_args, settings.selection.policy
    if value_of(arguments, "--torchao-config"):
        raise SettingsError(
            f"SGLang argument --torchao-config cannot be passed with policy={policy}: it predicts "
            f"queries from W_q, which torchao keeps in its own form; drop it, or "
            f"{WITHOUT_PREDICTION}"
        )
    weights = read_weight_format(model_dir, config)
    if weights is None:
        return
    load_format = value_of(arguments, "--load-format") or "auto"
    if load_format in LOADED_FROM_SAFETENSORS:
        QueryCheckpoint(model_dir).check()
        return
    # The one layout that is read from SGLang's modules: see `read_projection`.
    if load_format != "dummy" or weights.packing != "fp8" or weights.block is None:
        raise UnsupportedModelError(
            f"model={model_dir.name}, quantisation={weights.method}, --load-format {load_format}: "
            f"policy={policy} predicts queries from W_q, which is read from safetensors if it is "
            f"quantised; use --load-format auto, or {WITHOUT_PREDICTION}"
        )
