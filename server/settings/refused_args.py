# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments and variables that contradict tandemkv, by the reason.

Names are those of every version that is taken; `tests/unit/server/test_sglang_args.py` compares
them with the parser of the installed one.
"""

from __future__ import annotations

from collections.abc import Mapping

_DRAFT_MODEL = (
    "drafts of a model (EAGLE, MTP) are not supported, as docs/models.md says; NGRAM is, by "
    "--speculative-algorithm, --speculative-num-draft-tokens and --speculative-ngram-…"
)
_PAST_INDEX = "tokens are selected from a key index, and K/V that it brings back are not in there"
_OWN_LAYOUT = "tandemkv has its own KV layout"
_PAST_EDGE = "its requests would not pass the checks of the HTTP server"
_OTHER_BACKENDS = (
    "SGLang has it with some of its own attention backends alone, and ends with others"
)
_PREFILL_GRAPHS = "sets of prompts are filled outside of graphs"
_NOT_WHOLE = "what a layer gets would be a part of the batch, and queries are predicted for all"
_OFFLOADED = "a layer of which weights are elsewhere cannot be hooked"
_FIXED_WEIGHTS = "weights are read from files, once, and the routes that change them are closed"
_FIXED_RANKS = "ranks do not change while a server runs"
_NO_DISAGGREGATION = "disaggregation is not supported"
_NO_CONTEXT_PARALLEL = "context parallelism is not available in this version; use --tp"


def _each(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each name."""
    return {name: why for why, names in names_by_reason.items() for name in names.split()}


_SAME_FLAG = (
    "--host", "--port", "--device", "--dtype", "--max-running-requests", "--chunked-prefill-size",
    "--kv-cache-dtype", "--nnodes", "--node-rank", "--max-queued-requests",
)  # fmt: skip
_REFUSED = {
    # What tandemkv gives SGLang itself.
    "give the model as the argument MODEL": "--model-path --model",
    "use --max-context of tandemkv": "--context-length",
    "use --cache-tokens of tandemkv": "--max-total-tokens",
    "use --tp of tandemkv": "--tp-size --tensor-parallel-size",
    "use --dist-init-addr of tandemkv, with --nnodes": "--dist-init-addr --nccl-init-addr",
    "a second configuration file could undo these checks; pass the arguments singly": "--config",
    "the cache rank reads config.json of the model": "--decrypted-config-file",
    "tandemkv is the attention backend": "--attention-backend --decode-attention-backend "
    "--prefill-attention-backend",
    _OTHER_BACKENDS: "--enable-deterministic-inference --rl-on-policy-target --enable-mis",
    "tandemkv captures decode steps alone; use the flags for each setting": "--cuda-graph-config",
    "full graphs, or --disable-decode-cuda-graph for none": "--cuda-graph-backend-decode "
    "--debug-cuda-graph",
    _PREFILL_GRAPHS: "--enforce-piecewise-cuda-graph --enable-breakable-cuda-graph",
    "name the GPUs in CUDA_VISIBLE_DEVICES": "--base-gpu-id --gpu-id-step",
    # Doors beside the HTTP server, keys that others see, code in requests.
    "it would be seen in command lines and logs; use --api-key-file of tandemkv": "--api-key",
    "it would be seen in command lines; use --admin-key-file of tandemkv": "--admin-api-key",
    "only the HTTP server is supported": "--smg-grpc-mode --grpc-mode",
    _PAST_EDGE: "--grpc-port --sidecar --sidecar-args",
    "it publishes tokens of prompts on a port on which nobody needs a key": "--kv-events-config",
    "it opens a port on which nobody needs a key": "--forward-pass-metrics-ipc-name "
    "--load-publish-endpoint --gated-launch-port --engine-info-bootstrap-port",
    "the checks of requests are made for uvicorn": "--enable-http2",
    "the checks of requests go by the path as it comes": "--fastapi-root-path",
    "requests would carry pickled code": "--enable-custom-logit-processor",
    "ray is not supported": "--use-ray",
    # K/V that are elsewhere, or laid out otherwise.
    _PAST_INDEX: "--enable-hierarchical-cache --enable-hicache --enable-lmcache --enable-flexkv "
    "--enable-unified-cache-external-linker --radix-cache-backend",
    "the resident set is tandemkv's own": "--enable-hisparse",
    _OWN_LAYOUT: "--enable-page-major-kv-layout --enable-kv-cache-sharding",
    "tandemkv has its own KV pool": "--enable-unified-memory",
    "the routes that release memory are closed": "--enable-memory-saver "
    "--enable-weights-cpu-backup",
    "scales of K and V in FP8 are not supported": "--quantization-param-path",
    "there would be no KV to keep": "--prefill-only-disable-kv-cache",
    "sessions are not served": "--enable-streaming-session --enable-session-radix-cache",
    # Passes in which a layer is not called, or not with all of the batch.
    "prefill and decode in one step are not supported": "--enable-mixed-chunk",
    "prefill-decode multiplexing is not supported": "--enable-pdmux",
    "it decodes past the attention backend": "--enable-nvidia-megakernel --enable-amd-monokernel "
    "--monokernel-backend",
    "a layer's residual stream could not be read": "--enable-two-batch-overlap",
    _NOT_WHOLE: "--enable-layernorm-sp --moe-dense-tp-size --enable-waterfill",
    _NO_CONTEXT_PARALLEL: "--enable-prefill-cp --enable-prefill-context-parallel "
    "--enable-dsa-prefill-context-parallel --enable-nsa-prefill-context-parallel",
    # Weights that change, or go.
    _OFFLOADED: "--cpu-offload-gb",
    "a rank that is started again reads the model again": "--delete-ckpt-after-loading",
    _FIXED_WEIGHTS: "--checkpoint-engine-wait-weights-before-ready --modelexpress-config",
    _FIXED_RANKS: "--max-ep-size --enable-elastic-expert-backup",
    # What is not served.
    _NO_DISAGGREGATION: "--language-only",
    "models are served for text": "--enable-multimodal --is-embedding",
    "SGLang ends itself behind the first request": "--debug-tensor-dump-input-file",
}
REFUSED = {name: f"use {name} of tandemkv" for name in _SAME_FLAG} | _each(_REFUSED)
FAMILIES = _each(
    {
        f"HiCache is not supported: {_PAST_INDEX}": "--hicache-",
        "prefill-decode disaggregation is not supported": "--disaggregation-",
        _NO_DISAGGREGATION: "--encoder-",
        _DRAFT_MODEL: "--speculative- --decoupled-spec-",
        "the KV canary reads a pool that tandemkv does not have": "--kv-canary",
        "readiness is asked over HTTP; put what speaks TLS before the server": "--ssl-",
        "diffusion language models are not supported": "--dllm-",
        "a compiler does not see what is selected beside the model": "--enable-torch-compile",
        _OFFLOADED: "--offload-",
        _FIXED_RANKS: "--elastic-ep-",
        _FIXED_WEIGHTS: "--remote-instance-weight-loader- --weight-cache-",
    }
)
ALLOWED = ("--speculative-algorithm", "--speculative-num-draft-tokens", "--quantization")
ALLOWED_FAMILY = "--speculative-ngram-"
"""Whole names, of those families or with which a refused one begins; `check_speculation` refuses
what drafts do not go with."""
_ONE = {
    "pipeline parallelism is not available in this version": "--pp-size --pipeline-parallel-size",
    "data parallelism is not available in this version": "--dp-size --data-parallel-size "
    "--attn-dp-size --attention-data-parallel-size --moe-dp-size --moe-data-parallel-size "
    "--dwdp-size",
    _NO_CONTEXT_PARALLEL: "--attn-cp-size --attention-context-parallel-size --dcp-size "
    "--decode-context-parallel-size",
    "requests are checked in one HTTP process": "--tokenizer-worker-num",
}
ONLY = {name: ("1", why) for name, why in _each(_ONE).items()} | {
    "--speculative-algorithm": ("NGRAM", _DRAFT_MODEL),
    "--moe-a2a-backend": ("none", _NOT_WHOLE),
    "--startup-weight-load-mode": ("serial", _FIXED_WEIGHTS),
    "--cuda-graph-backend-prefill": ("disabled", _PREFILL_GRAPHS),
}
"""The one value that may be given."""
ONLY_ON_CPU = {
    "--page-size": ("1", "SGLang pages larger than 1 need a GPU"),
    # Up to 0.5.17 the first request with a grammar ends SGLang: it pins memory, and masks on GPUs.
    "--grammar-backend": ("none", "SGLang needs a GPU for grammars and JSON schemas"),
}
NEVER = {
    "--load-format": ("remote_instance", _FIXED_WEIGHTS),
    "--page-size": ("0", "a page has one token at least"),
}
"""A value that may not be given."""

VARIABLES = {
    "SGLANG_GRPC_PORT": _PAST_EDGE,
    "SGLANG_RUST_SERVER": _PAST_EDGE,
    "SGLANG_OPT_USE_DEEPGEMM_MEGA_MOE": _NOT_WHOLE,
    "SGLANG_USE_HND_KVCACHE": _OWN_LAYOUT,
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "a graph would hold what is done on the host for a step",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "its models would take the place of those that are known here",
}
"""Of SGLang's environment, which its process inherits."""
VARIABLE_FAMILIES = {
    "DUMPER_": "SGLang's dumper opens ports on which nobody needs a key, and unpickles there",
    "SGLANG_TEST_SCRIPTED_RUNTIME": "SGLang would run scripts that come over a socket",
}
