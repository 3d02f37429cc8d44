# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's own arguments may be passed through.

SGLang's parser accepts unambiguous abbreviations, so a refused name is also refused when
it is shortened.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandemkv.cache_rank.protocol.errors import SettingsError

_DRAFT_MODEL = (
    "drafts of a model (EAGLE, MTP) are not supported, as docs/models.md says; NGRAM is, by "
    "--speculative-algorithm, --speculative-num-draft-tokens and --speculative-ngram-…"
)
_PAST_INDEX = "tokens are selected from a key index, and K/V that it brings back are not in there"
_SAME_FLAG = (
    "--host", "--port", "--device", "--dtype", "--max-running-requests", "--chunked-prefill-size",
    "--kv-cache-dtype", "--nnodes", "--node-rank",
)  # fmt: skip
_REFUSED = {name: f"use {name} of tandemkv" for name in _SAME_FLAG} | {
    "--model-path": "give the model as the argument MODEL",
    "--model": "give the model as the argument MODEL",
    "--context-length": "use --max-context of tandemkv",
    "--max-total-tokens": "use --cache-tokens of tandemkv",
    "--api-key": "it would be seen in command lines and logs; use --api-key-file of tandemkv",
    "--admin-api-key": "it would be seen in command lines; use --admin-key-file of tandemkv",
    "--dist-init-addr": "use --dist-init-addr of tandemkv, with --nnodes",
    "--config": "a second configuration file could undo these checks; pass the arguments singly",
    "--attention-backend": "tandemkv is the attention backend",
    "--decode-attention-backend": "tandemkv is the attention backend",
    "--prefill-attention-backend": "tandemkv is the attention backend",
    "--enable-mixed-chunk": "prefill and decode in one step are not supported",
    "--enable-hierarchical-cache": _PAST_INDEX,
    "--enable-hisparse": "the resident set is tandemkv's own",
    "--enable-lmcache": _PAST_INDEX,
    "--enable-flexkv": _PAST_INDEX,
    "--enable-pdmux": "prefill-decode multiplexing is not supported",
    "--enable-page-major-kv-layout": "tandemkv has its own KV layout",
    "--enable-unified-memory": "tandemkv has its own KV pool",
    "--cuda-graph-config": "tandemkv captures decode steps alone; use the flags for each setting",
    "--cuda-graph-backend-decode": "full graphs, or --disable-decode-cuda-graph for none",
    "--enable-kv-cache-sharding": "tandemkv has its own KV layout",
    "--enable-layernorm-sp": "a layer's input would be a part of the residual stream",
    "--enable-nvidia-megakernel": "it decodes past the attention backend",
    "--enable-amd-monokernel": "it decodes past the attention backend",
    "--enable-unified-cache-external-linker": _PAST_INDEX,
    "--prefill-only-disable-kv-cache": "there would be no KV to keep",
    "--encoder-only": "disaggregation is not supported",
    "--language-only": "disaggregation is not supported",
    "--smg-grpc-mode": "only the HTTP server is supported",
    "--grpc-mode": "only the HTTP server is supported",
    "--use-ray": "ray is not supported",
    "--enable-http2": "the checks of requests are made for uvicorn",
    "--fastapi-root-path": "the checks of requests go by the path as it comes",
    "--enable-multimodal": "models are served for text",
    "--enable-custom-logit-processor": "requests would carry pickled code",
}
_REFUSED_FAMILIES = {
    "--hicache-": f"HiCache is not supported: {_PAST_INDEX}",
    "--disaggregation-": "prefill-decode disaggregation is not supported",
    "--speculative-": _DRAFT_MODEL,
    "--decoupled-spec-": _DRAFT_MODEL,
    "--kv-canary": "the KV canary reads a pool that tandemkv does not have",
    "--ssl-": "readiness is asked over HTTP; put what speaks TLS before the server",
    "--dllm-": "diffusion language models are not supported",
}
_ALLOWED = ("--speculative-algorithm", "--speculative-num-draft-tokens")
_ALLOWED_FAMILY = "--speculative-ngram-"
"""Of those families; `check_speculation` refuses what they do not go with."""
_NO_CONTEXT_PARALLEL = "context parallelism is not available in this version; use --tp"
_ONLY = {
    "--speculative-algorithm": ("NGRAM", _DRAFT_MODEL),
    "--tp-size": ("1", "use --tp of tandemkv"),
    "--tensor-parallel-size": ("1", "use --tp of tandemkv"),
    "--pp-size": ("1", "pipeline parallelism is not available in this version"),
    "--pipeline-parallel-size": ("1", "pipeline parallelism is not available in this version"),
    "--dp-size": ("1", "data parallelism is not available in this version"),
    "--data-parallel-size": ("1", "data parallelism is not available in this version"),
    "--attn-cp-size": ("1", _NO_CONTEXT_PARALLEL),
    "--attention-context-parallel-size": ("1", _NO_CONTEXT_PARALLEL),
    "--dcp-size": ("1", _NO_CONTEXT_PARALLEL),
    "--decode-context-parallel-size": ("1", _NO_CONTEXT_PARALLEL),
    "--tokenizer-worker-num": ("1", "requests are checked in one HTTP process"),
    "--startup-weight-load-mode": (
        "serial",
        "queries are predicted with weights read at the start",
    ),
    "--cuda-graph-backend-prefill": ("disabled", "sets of prompts are filled outside of graphs"),
}
_ON_CPU = {"--page-size": ("1", "SGLang pages larger than 1 need a GPU")}


def check_sglang_args(args: Sequence[str], *, device: str) -> None:
    """Refuse arguments that contradict tandemkv.

    Raises `SettingsError`, naming the argument and what to do.
    """
    only = {**_ONLY, **(_ON_CPU if device == "cpu" else {})}
    for position, argument in enumerate(args):
        if not argument.startswith("--"):
            continue
        name, has_value, value = argument.partition("=")
        if not has_value:
            value = args[position + 1] if position + 1 < len(args) else ""
        reason = _reason(name)
        if reason is None:
            for full, (allowed, why) in only.items():
                if _means(name, full) and value != allowed:
                    reason = f"{why}; only {allowed} is possible"
        if reason is not None:
            raise SettingsError(f"SGLang argument {name} cannot be passed: {reason}")


def value_of(args: Sequence[str], full: str) -> str | None:
    """Return the value of the argument `full`, which may be shortened; None if it is not given.

    The last one counts, as in SGLang's parser. The value of a flag that takes none is the empty
    text, or the argument behind it.
    """
    value = None
    for position, argument in enumerate(args):
        name, has_value, text = argument.partition("=")
        if _means(name, full):
            value = text if has_value else "".join(args[position + 1 : position + 2])
    return value


def _reason(name: str) -> str | None:
    for full, why in _REFUSED.items():
        if _means(name, full):
            return why
    if name in _ALLOWED or name.startswith(_ALLOWED_FAMILY):
        return None
    for family, why in _REFUSED_FAMILIES.items():
        if name.startswith(family) or _means(name, family):
            return why
    return None


def _means(name: str, full: str) -> bool:
    """Whether argparse could take `name` for `full`: equal, or a beginning of it."""
    return len(name) > 2 and full.startswith(name)
