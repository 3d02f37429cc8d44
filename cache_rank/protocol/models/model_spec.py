# SPDX-License-Identifier: Apache-2.0
"""The shape of a model as both ranks must see it, read from its directory."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tandemkv.cache_rank.protocol.errors import ProtocolError, SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.settings.placement import Placement

from .architectures import ARCHITECTURES, Architecture, find_architecture
from .attention_config import check_attention, linear_layers, softmax_scale, windowed_layers

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Context = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=1024)]
Layer = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Layers = Annotated[tuple[Layer, ...], msgspec.Meta(max_length=1 << 12)]

_HASHED_BYTES = 1 << 20
_OF_THE_WHOLE_MODEL = ("architectures", "quantization_config", "tie_word_embeddings")
"""Fields of ``config.json`` that mean the decoder wherever its other fields are."""


class ModelSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape and identity of a model.

    `max_context` is in tokens; `dtype` is the torch name of the dtype that the model computes in,
    e.g. ``float32``; `kv_dtype` that of K and V in the pool and in resident sets, None for the
    same; `softmax_scale` is None where it is ``1 / sqrt(head_dim)``; `windowed_layers` attend to a
    sliding window, by SGLang's own backend; `linear_layers` have a state in place of K and V.
    """

    architecture: Text
    num_layers: Count
    num_qo_heads: Count
    num_kv_heads: Count
    head_dim: Count
    hidden_size: Count
    max_context: Context
    dtype: Text
    model_hash: Text
    softmax_scale: Scale | None = None
    kv_dtype: Text | None = None
    windowed_layers: Layers = ()
    linear_layers: Layers = ()

    @property
    def other_layers(self) -> tuple[int, ...]:
        """Layers that do not attend to the whole context: SGLang's, and nothing is selected."""
        return (*self.windowed_layers, *self.linear_layers)

    @property
    def stored_dtype(self) -> str:
        """Torch name of the dtype of K and V, where they are kept."""
        return self.kv_dtype or self.dtype

    @property
    def gqa_group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Softmax scale of the attention logits."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        return 1.0 / math.sqrt(self.head_dim)


def shard_of(model: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the shape of what each of `num_ranks` tensor-parallel ranks has of `model`.

    Query heads are divided; so are KV heads, of which each rank has one if there are fewer.
    """
    return msgspec.structs.replace(
        model,
        num_qo_heads=model.num_qo_heads // num_ranks,
        num_kv_heads=max(1, model.num_kv_heads // num_ranks),
    )


def heads_before(num_kv_heads: int, num_ranks: int, rank: int) -> int:
    """Return how many of a model's KV heads come before those of a tensor-parallel rank.

    Several ranks have the same one if there are fewer heads than ranks.
    """
    return rank * num_kv_heads // num_ranks


def part_of(model: ModelSpec, shard: HeadShard) -> ModelSpec:
    """Return the shape of `shard` of an inference rank's `model`; query heads go with KV heads."""
    return msgspec.structs.replace(
        model,
        num_qo_heads=shard.part(model.num_qo_heads),
        num_kv_heads=shard.part(model.num_kv_heads),
    )


def part_for(whole: ModelSpec, placement: Placement, rank: int) -> tuple[ModelSpec, HeadShard]:
    """Return what cache rank `rank` has of `whole`, and which heads of its inference rank they are.

    Raises `SettingsError` if there are fewer KV heads than cache ranks.
    """
    model, head_shards = shard_of(whole, placement.tp_size), placement.head_shards
    if head_shards > model.num_kv_heads:
        raise SettingsError(
            f"cache_ranks: {head_shards} share {model.num_kv_heads} KV heads, and each needs one"
        )
    before = heads_before(whole.num_kv_heads, placement.tp_size, rank // head_shards)
    shard = HeadShard(rank % head_shards, head_shards, model.num_kv_heads, before)
    return part_of(model, shard), shard


COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
FP8_KV = "float8_e4m3fn"


def model_as_claimed(ours: ModelSpec, claimed: ModelSpec) -> ModelSpec:
    """Return our model with the dtype and context that the inference rank was given.

    Raises `ProtocolError` if the dtype is none that is served.
    """
    if claimed.dtype not in COMPUTE_DTYPES:
        raise ProtocolError(f"dtype={claimed.dtype} must be one of {', '.join(COMPUTE_DTYPES)}")
    return msgspec.structs.replace(ours, dtype=claimed.dtype, max_context=claimed.max_context)


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return ``config.json`` of a model directory.

    Where its architecture describes the decoder in a field of its own (`Architecture`), the fields
    in there are beside the others. Raises `UnsupportedModelError` if there is no readable
    ``config.json``, or no such field in it.
    """
    path = model_dir / "config.json"
    try:
        _check_regular(path)
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(
            f"model={model_dir}: no readable config.json ({error}); give a model directory "
            "in Hugging Face layout, or `smollm2`"
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"model={model_dir}: config.json is not an object")
    return _with_decoder(config, model_dir)


def _check_regular(path: Path) -> None:
    """Raise `OSError` where reading may wait, or go on, for ever: a FIFO or a device."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")


def _with_decoder(config: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Return a ``config.json`` with the decoder's fields beside the others."""
    entry = ARCHITECTURES.get(_named_in(config))
    if entry is None or not entry.decoder_config:
        return config
    decoder = config.get(entry.decoder_config)
    if not isinstance(decoder, dict):
        raise UnsupportedModelError(
            f"model={model_dir}: config.json of {entry.name} has no object {entry.decoder_config}; "
            "copy or download it again"
        )
    own = {name: x for name, x in decoder.items() if name not in _OF_THE_WHOLE_MODEL}
    return {**config, **own}


def _named_in(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "unknown"


def architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    """Return the entry of the architecture that a ``config.json`` names.

    Raises `UnsupportedModelError`, with the reason, if it is not supported.
    """
    return find_architecture(_named_in(config))


def read_model_spec(
    model_dir: Path, *, dtype: str, kv_dtype: str | None = None, max_context: int | None = None
) -> ModelSpec:
    """Read and check the shape of the model in `model_dir`; see `ModelSpec` for the others.

    `model_dir` has ``config.json`` and safetensors; `max_context` is the model's own limit if not
    given. Raises `UnsupportedModelError` if the attention is not plain grouped-query attention over
    the whole context.
    """
    config = read_config(model_dir)
    spec = spec_of_config(config, model_dir, dtype=dtype, max_context=max_context)
    kv_dtype = None if kv_dtype == dtype else kv_dtype
    return msgspec.structs.replace(spec, model_hash=model_hash(model_dir), kv_dtype=kv_dtype)


def spec_of_config(
    config: Mapping[str, Any], model_dir: Path, *, dtype: str, max_context: int | None = None
) -> ModelSpec:
    """Return what `read_model_spec` does, by ``config.json`` alone: `model_hash` is empty.

    `model_dir` is for messages.
    """
    entry = architecture_of_config(config)
    check_attention(config, entry, name=model_dir.name)
    try:
        heads = int(config["num_attention_heads"])
        spec = ModelSpec(
            architecture=entry.name,
            num_layers=int(config["num_hidden_layers"]),
            num_qo_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            hidden_size=int(config["hidden_size"]),
            max_context=max_context or int(config["max_position_embeddings"]),
            dtype=dtype,
            model_hash="",
            softmax_scale=softmax_scale(config, entry),
            windowed_layers=windowed_layers(config, entry),
            linear_layers=linear_layers(config, entry),
        )
        msgspec.convert(msgspec.structs.astuple(spec), ModelSpec)  # what a message may carry
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnsupportedModelError(
            f"model={model_dir}: config.json lacks or garbles a field of the attention's shape "
            f"({type(error).__name__}: {error})"
        ) from error
    if spec.num_qo_heads % spec.num_kv_heads:
        raise UnsupportedModelError(
            f"model={model_dir}: num_attention_heads={spec.num_qo_heads} must be a multiple of "
            f"num_key_value_heads={spec.num_kv_heads}"
        )
    return spec


def model_hash(model_dir: Path) -> str:
    """Hash of the model's identity: configuration, and head and tail of each weight file.

    Not a checksum of every weight (16 GB would delay each start by many seconds); it tells two
    models apart, and two versions of one whose file sizes, headers or last MiB differ. Raises
    `UnsupportedModelError` if a file cannot be read, a link to a missing file for example.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in [model_dir / "config.json", *sorted(model_dir.glob("*.safetensors"))]:
        try:
            _check_regular(path)
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                digest.update(file.read(_HASHED_BYTES))
                if size > _HASHED_BYTES:
                    file.seek(max(_HASHED_BYTES, size - _HASHED_BYTES))
                    digest.update(file.read(_HASHED_BYTES))
        except OSError as error:
            raise UnsupportedModelError(
                f"{path}: cannot be read ({error.strerror}); finish the copy or download of the "
                "model, or correct the file's permissions"
            ) from error
    return digest.hexdigest()
