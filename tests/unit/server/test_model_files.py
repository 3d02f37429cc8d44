# SPDX-License-Identifier: Apache-2.0
"""Damaged model directories are refused in one line, unusual ones are not."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import CONFIG, shapes, write_model, write_safetensors, write_weights
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.models.model_spec import read_config, read_model_spec
from tandemkv.server.checks.model_files import ModelFilesError, check_model_files, weight_bytes
from tandemkv.server.cli.commands import app
from tandemkv.server.settings.sglang_args import value_of

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_model(tmp_path / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_model(tmp_path / "sharded", shards=3)


def check(model_dir: Path, *sglang_args: str) -> None:
    check_model_files(model_dir, read_config(model_dir), sglang_args)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What is damaged in a model of three shards, and what the error has to say.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda d: truncate(d / SECOND), rf"{SECOND}: no whole safetensors file .*again"),
    "longer": (
        lambda d: (d / SECOND).write_bytes((d / SECOND).read_bytes() + b"xx"),
        rf"{SECOND}: no whole safetensors file",
    ),
    "empty": (lambda d: (d / SECOND).write_bytes(b""), rf"{SECOND}: no whole .* of 0 bytes"),
    "garbage": (lambda d: (d / SECOND).write_bytes(b"\xff" * 4096), rf"{SECOND}: .*header"),
    "absurd header": (
        lambda d: (d / SECOND).write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        rf"{SECOND}: .*header too large",
    ),
    "nested header": (
        lambda d: (d / SECOND).write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
        rf"{SECOND}: .*invalid JSON",
    ),
    "pointer": (
        lambda d: (d / SECOND).write_text("version git-lfs\noid sha256:0\nsize 5\n"),
        rf"{SECOND}: a Git LFS pointer.*git lfs pull",
    ),
    "missing shard": (
        lambda d: (d / SECOND).unlink(),
        rf"{SECOND}: the file is missing \(1 of 3 files that {INDEX}",
    ),
    "missing shard without index": (
        lambda d: ((d / SECOND).unlink(), (d / INDEX).unlink()),
        rf"{SECOND}: the file is missing \(1 of 3 files that the names of the other shards",
    ),
    "no weights": (
        lambda d: [path.unlink() for path in (*d.glob("*.safetensors"), d / INDEX)],
        r"no weights \(\*\.safetensors\) in it; finish the copy",
    ),
    "index is no JSON": (lambda d: (d / INDEX).write_text("{"), rf"{INDEX}: no readable JSON"),
    "index is a list": (lambda d: (d / INDEX).write_text("[]"), rf"{INDEX}: .*not an object"),
    "index without files": (lambda d: (d / INDEX).write_text("{}"), "it has no weight_map"),
    "index leads elsewhere": (
        lambda d: (d / INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}'),
        "must be the name of a file beside it",
    ),
    "index of another model": (
        lambda d: edit_json(d / INDEX, weight_map={"other.weight": SECOND}),
        rf"{SECOND}: lacks the tensor other\.weight that {INDEX} places in it",
    ),
    "more layers in config": (
        lambda d: edit_json(d / "config.json", num_hidden_layers=5),
        r"num_hidden_layers=5, but the checkpoint has no tensor model\.layers\.4\..*has 4 layers",
    ),
    "fewer layers in config": (
        lambda d: edit_json(d / "config.json", num_hidden_layers=3),
        r"num_hidden_layers=3, but the checkpoint has 4 layers; config\.json and weights",
    ),
    "hidden size": (
        lambda d: edit_json(d / "config.json", hidden_size=128, head_dim=8),
        r"model\..* has shape \[.*\], config\.json means \[.*128\]",
    ),
    "KV heads": (
        lambda d: edit_json(d / "config.json", num_key_value_heads=4),
        r"k_proj\.weight has shape \[16, 64\], config\.json means \[32, 64\]",
    ),
    "vocabulary": (
        lambda d: edit_json(d / "config.json", vocab_size=101),
        r"embed_tokens\.weight has shape \[100, 64\], config\.json means \[101, 64\]",
    ),
    "no tokenizer": (
        lambda d: (d / "tokenizer.json").unlink(),
        r"no tokenizer \(none of tokenizer\.json, .*--tokenizer-path DIR",
    ),
    "empty tokenizer": (
        lambda d: (d / "tokenizer.json").write_text(""),
        r"tokenizer\.json: the file is empty",
    ),
    "damaged tokenizer": (
        lambda d: (d / "tokenizer.json").write_text('{"version": "1.0"'),
        r"tokenizer\.json: not a tokenizer that the tokenizers library reads",
    ),
    "damaged tokenizer_config": (
        lambda d: (d / "tokenizer_config.json").write_text("[" * 100_000),
        r"tokenizer_config\.json: no readable JSON",
    ),
    "damaged generation_config": (
        lambda d: (d / "generation_config.json").write_text("<html>"),
        r"generation_config\.json: no readable JSON",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=list(DAMAGES))
def test_refuses_what_is_damaged(
    sharded: Path, damage: Callable[[Path], object], message: str
) -> None:
    check(sharded)
    damage(sharded)
    with pytest.raises(ModelFilesError, match=message) as caught:
        check(sharded)
    assert "\n" not in str(caught.value)
    assert str(sharded) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
             "model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.v_proj.weight"],
)  # fmt: skip
def test_refuses_a_checkpoint_that_lacks_a_tensor(whole: Path, name: str) -> None:
    left = shapes()
    del left[name]
    write_weights(whole, left)
    with pytest.raises(
        ModelFilesError, match=rf"the checkpoint has no tensor {name}".replace(".", r"\.")
    ):
        check(whole)


def test_refuses_pickles_unless_a_format_is_named(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match=r"pickled \(pytorch_model\.bin\).*run code.*convert"):
        check(whole)
    with pytest.raises(ModelFilesError, match="pickled"):
        check(whole, "--load-format", "auto")
    check(whole, "--load-format", "npcache")


def test_accepts_unusual_layouts(tmp_path: Path) -> None:
    """What is not known is passed over: it may be right."""
    tied = write_model(tmp_path / "tied", CONFIG | {"tie_word_embeddings": True})
    check(tied)
    write_weights(tied, shapes())  # with an lm_head nevertheless
    check(tied)
    extra = write_model(tmp_path / "extra")
    write_weights(extra, shapes() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
        "model.layers.0.self_attn.q_proj.bias": (64,), "eagle.fc.weight": (3, 3),
    })  # fmt: skip
    check(extra)
    several = write_model(tmp_path / "several", CONFIG | {"num_nextn_predict_layers": 1})
    write_weights(several, shapes(CONFIG | {"num_hidden_layers": 5}))
    check(several)
    fused = write_model(tmp_path / "fused")
    write_weights(fused, {
        name.replace("q_proj", "qkv_proj"): (96, 64) if "q_proj" in name else shape
        for name, shape in shapes().items() if "k_proj" not in name and "v_proj" not in name
    })  # fmt: skip
    check(fused)
    renamed = write_model(tmp_path / "renamed")
    write_weights(renamed, {f"language_model.{name}": s for name, s in shapes().items()})
    check(renamed)
    both = write_model(tmp_path / "both")
    (both / "consolidated.safetensors").write_bytes(b"Mistral's own layout, which SGLang skips")
    check(both)
    assert weight_bytes(both) == (both / "model.safetensors").stat().st_size
    beside = write_model(tmp_path / "beside", shards=3)
    (beside / "consolidated.safetensors").write_bytes(b"not in the index")
    check(beside)
    assert weight_bytes(beside) == sum(x.stat().st_size for x in beside.glob("model-*"))


@pytest.mark.parametrize("mark", ["quantization_config", "compression_config", "file"])
def test_accepts_quantised_weights_of_any_shape(whole: Path, mark: str) -> None:
    write_safetensors(
        whole / "model.safetensors", {"model.layers.0.self_attn.q_proj.qweight": (8, 3)}
    )
    check(whole)  # nothing in it is known
    write_safetensors(
        whole / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": (8, 3)}
    )
    with pytest.raises(ModelFilesError, match="has no tensor"):
        check(whole)
    if mark == "file":
        (whole / "hf_quant_config.json").write_text("{}")
    else:
        edit_json(whole / "config.json", **{mark: {"quant_method": "fp8"}})
    check(whole)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json", "qwen.tiktoken"])
def test_accepts_other_tokenizers(whole: Path, name: str) -> None:
    (whole / "tokenizer.json").rename(whole / name)
    check(whole)


def test_a_tokenizer_may_be_elsewhere_or_not_needed(whole: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (whole / "tokenizer.json").rename(elsewhere / "tokenizer.json")
    check(whole, "--tokenizer-path", str(elsewhere))
    check(whole, f"--tokenizer-path={elsewhere}")
    check(whole, "--skip-tokenizer-init")
    with pytest.raises(ModelFilesError, match="no tokenizer"):
        check(whole, "--tokenizer-path", str(tmp_path))
    (elsewhere / "tokenizer.json").unlink()
    (elsewhere / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["a.B", null]}}'
    )
    check(whole, "--tokenizer-path", str(elsewhere))


def test_weights_and_shapes_are_not_checked_where_sglang_is_told_otherwise(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    check(whole, "--load-format", "dummy")
    write_weights(whole, shapes(CONFIG | {"num_hidden_layers": 2}))
    check(whole, "--json-model-override-args", '{"num_hidden_layers": 2}')
    assert value_of(["--load-format=a", "--load-f", "b"], "--load-format") == "b"
    assert value_of(["--skip-tokenizer-init"], "--skip-tokenizer-init") == ""
    assert value_of(["--load-format-other", "a"], "--load-format") is None


@pytest.mark.parametrize(
    "text", ['{"num_hidden_layers": NaN}', '{"num_hidden_layers": Infinity}', '{"hidden_size": -1}',
             '{"num_attention_heads": 0}', '{"vocab_size": NaN}'],
)  # fmt: skip
def test_garbled_numbers_in_the_configuration(whole: Path, text: str) -> None:
    changes = json.loads(text)
    edit_json(whole / "config.json", **changes)
    if "vocab_size" in changes:
        check(whole)  # SGLang's own business: this version does not know what is meant
        return
    with pytest.raises(UnsupportedModelError, match="lacks or garbles a field"):
        read_model_spec(whole, dtype="bfloat16")


def test_links_to_nowhere_and_nested_configurations(whole: Path) -> None:
    (whole / "config.json").write_text("[" * 100_000)
    with pytest.raises(UnsupportedModelError, match=r"no readable config\.json"):
        read_config(whole)
    (whole / "config.json").write_text(json.dumps(CONFIG))
    (whole / "model.safetensors").unlink()
    (whole / "model.safetensors").symlink_to("gone")
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors: cannot be read"):
        read_model_spec(whole, dtype="bfloat16")


def test_hundreds_of_shards_take_less_than_three_seconds(tmp_path: Path) -> None:
    """The files are sparse; 405 billion parameters have 191 of them."""
    config = CONFIG | {
        "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    model = write_model(tmp_path / "large", config, shards=400)
    assert sum(path.stat().st_size for path in model.glob("*.safetensors")) > 700e9
    begin = time.monotonic()
    check(model)
    assert time.monotonic() - begin < 3.0


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 400), text=st.binary(min_size=1, max_size=12))
def test_a_damaged_header_never_raises_anything_else(whole: Path, place: int, text: bytes) -> None:
    """Bytes of the header are overwritten anywhere."""
    write_weights(whole, shapes())
    with (whole / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(text)
    with contextlib.suppress(ModelFilesError):
        check(whole)


def test_serve_says_it_in_one_line_before_it_starts_anything(whole: Path) -> None:
    truncate(whole / "model.safetensors")
    argv = ["serve", str(whole), "--device", "cpu", "--cache-ranks", "0", "--port", "0"]
    found = CliRunner().invoke(app, argv)
    assert found.exit_code == 2
    (line,) = [text for text in found.stderr.splitlines() if "error" in text]
    assert "model.safetensors: no whole safetensors file of" in line
    assert "copy or download the file again" in line
