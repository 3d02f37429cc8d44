# SPDX-License-Identifier: Apache-2.0
"""Convert the embedded model's GGUF file into a directory in Hugging Face layout.

Imported only while a model is unpacked, because it imports torch and transformers.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_gguf_pytorch_utils as gguf_reader
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

BOS, EOS, UNK = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
BOS_ID, EOS_ID = 1, 2
MAX_CONTEXT = 8192


def convert_gguf(gguf: Path, out: Path, report: Callable[[str], object]) -> None:
    """Write weights, configuration and tokenizer of a SmolLM2 GGUF file into a directory.

    `gguf` is SmolLM2-135M-Instruct, Q4_1 or finer; `out` is an existing, empty directory. Raises
    `OSError` if a file cannot be read or written.

    transformers' GGUF reader gets weights and chat template right, but (5.12.1) names the wrong
    end token, keeps no padding token, and loses the pre-tokenizer that splits digits one by one.
    These are put back as in the original model. Two runs write identical bytes.
    """
    with _without_progress_bars():
        report("reading the tokenizer")
        source = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
        report("reading the weights")
        model = _unpacked_model(gguf)
        report("writing the weights")
        model.config._name_or_path = "SmolLM2-135M-Instruct"
        model.config.tie_word_embeddings = True
        model.generation_config = GenerationConfig(
            bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID
        )
        model.save_pretrained(out)
        report("writing the tokenizer")
        repaired_tokenizer(source).save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)


def _unpacked_model(gguf: Path) -> Any:
    """Return the model of a GGUF file with plain bfloat16 weights.

    From 5.19 on transformers keeps quantized weights packed unless it is told not to, and writes no
    model that came from such a file: so a fresh one takes the weights over.
    """
    config_class = getattr(transformers, "GgufConfig", None)
    unpacks = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    read = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True,
        **unpacks,
    )  # fmt: skip
    if config_class is None:
        return read
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    return model


def repaired_tokenizer(source: Any) -> Any:
    """Return the tokenizer with SmolLM2's own splitting rules and special tokens.

    `source` is as transformers reads it from the GGUF file, and is not modified.
    """
    rules = json.loads(source.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    rules["normalizer"] = rules["post_processor"] = None
    rules["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {**byte_level, "add_prefix_space": False},
        ],
    }
    rules["decoder"] = {**byte_level, "add_prefix_space": True}
    rules["model"].update(unk_token=None, byte_fallback=False, fuse_unk=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )
    tokenizer.chat_template = source.chat_template
    return tokenizer


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on the caller's terminal: the caller reports progress."""
    bar = gguf_reader.tqdm
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    gguf_reader.tqdm = lambda iterable, **_: iterable  # that module's bar has no switch
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if was_enabled:
            transformers_logging.enable_progress_bar()
