# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments and variables that contradict tandemkv, each with the reason.

Names are those of every version that is taken; `tests/unit/server/test_sglang_args.py` compares
them with the parser of the installed one.
"""

from __future__ import annotations

_DRAFT_MODEL = (
    "drafts of a model (EAGLE, MTP) are not supported, as docs/models.md says; NGRAM is, by "
    "--speculative-algorithm, --speculative-num-draft-tokens and --speculative-ngram-…"
)
_PAST_INDEX = "tokens are selected from a key index, and K/V that it brings back are not in there"
_PAST_EDGE = "its requests would not pass the checks of the HTTP server"
_NO_KEY = "it opens a port on which nobody needs a key"
_PREFILL_GRAPHS = "sets of prompts are filled outside of graphs"
_OWN_LAYOUT = "tandemkv has its own KV layout"
_OWN_BACKEND = "tandemkv is the attention backend"
_PAST_BACKEND = "it decodes past the attention backend"
_NOT_WHOLE = "what a layer gets would be a part of the batch, and queries are predicted for all"
_NOT_READ = "a layer's residual stream could not be read"
_OFFLOADED = "a layer of which weights are elsewhere cannot be hooked"
_FIXED_WEIGHTS = "weights are read from files, once, and the routes that change them are closed"
_FIXED_RANKS = "ranks do not change while a server runs"
_NO_SESSIONS = "sessions are not served"
_NO_DISAGGREGATION = "disaggregation is not supported"
_DIST_INIT = "use --dist-init-addr of tandemkv, with --nnodes"
_TENSOR_PARALLEL = "use --tp of tandemkv"
_NO_PIPELINE = "pipeline parallelism is not available in this version"
_NO_DATA_PARALLEL = "data parallelism is not available in this version"
_NO_CONTEXT_PARALLEL = "context parallelism is not available in this version; use --tp"

_SAME_FLAG = (
    "--host", "--port", "--device", "--dtype", "--max-running-requests", "--chunked-prefill-size",
    "--kv-cache-dtype", "--nnodes", "--node-rank", "--max-queued-requests",
)  # fmt: skip
REFUSED = {name: f"use {name} of tandemkv" for name in _SAME_FLAG} | {
    # What tandemkv gives SGLang itself.
    "--model-path": "give the model as the argument MODEL",
    "--model": "give the model as the argument MODEL",
    "--context-length": "use --max-context of tandemkv",
    "--max-total-tokens": "use --cache-tokens of tandemkv",
    "--tp-size": _TENSOR_PARALLEL,
    "--tensor-parallel-size": _TENSOR_PARALLEL,
    "--dist-init-addr": _DIST_INIT,
    "--nccl-init-addr": _DIST_INIT,
    "--config": "a second configuration file could undo these checks; pass the arguments singly",
    "--decrypted-config-file": "the cache rank reads config.json of the model",
    "--attention-backend": _OWN_BACKEND,
    "--decode-attention-backend": _OWN_BACKEND,
    "--prefill-attention-backend": _OWN_BACKEND,
    "--cuda-graph-config": "tandemkv captures decode steps alone; use the flags for each setting",
    "--cuda-graph-backend-decode": "full graphs, or --disable-decode-cuda-graph for none",
    "--enforce-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "--enable-breakable-cuda-graph": _PREFILL_GRAPHS,
    "--base-gpu-id": "name the GPUs in CUDA_VISIBLE_DEVICES",
    "--gpu-id-step": "name the GPUs in CUDA_VISIBLE_DEVICES",
    # Doors beside the HTTP server, keys that others see, code in requests.
    "--api-key": "it would be seen in command lines and logs; use --api-key-file of tandemkv",
    "--admin-api-key": "it would be seen in command lines; use --admin-key-file of tandemkv",
    "--smg-grpc-mode": "only the HTTP server is supported",
    "--grpc-mode": "only the HTTP server is supported",
    "--grpc-port": _PAST_EDGE,
    "--sidecar": _PAST_EDGE,
    "--sidecar-args": _PAST_EDGE,
    "--kv-events-config": "it publishes tokens of prompts on a port on which nobody needs a key",
    "--forward-pass-metrics-ipc-name": _NO_KEY,
    "--load-publish-endpoint": _NO_KEY,
    "--gated-launch-port": _NO_KEY,
    "--engine-info-bootstrap-port": _NO_KEY,
    "--enable-http2": "the checks of requests are made for uvicorn",
    "--fastapi-root-path": "the checks of requests go by the path as it comes",
    "--enable-custom-logit-processor": "requests would carry pickled code",
    "--use-ray": "ray is not supported",
    # K/V that are elsewhere, or laid out otherwise.
    "--enable-hierarchical-cache": _PAST_INDEX,
    "--enable-hicache": _PAST_INDEX,
    "--enable-hisparse": "the resident set is tandemkv's own",
    "--enable-lmcache": _PAST_INDEX,
    "--enable-flexkv": _PAST_INDEX,
    "--enable-unified-cache-external-linker": _PAST_INDEX,
    "--radix-cache-backend": _PAST_INDEX,
    "--enable-page-major-kv-layout": _OWN_LAYOUT,
    "--enable-unified-memory": "tandemkv has its own KV pool",
    "--enable-kv-cache-sharding": _OWN_LAYOUT,
    "--enable-memory-saver": "the routes that release memory are closed",
    "--enable-weights-cpu-backup": "the routes that release memory are closed",
    "--prefill-only-disable-kv-cache": "there would be no KV to keep",
    "--enable-streaming-session": _NO_SESSIONS,
    "--enable-session-radix-cache": _NO_SESSIONS,
    # Passes in which a layer is not called, or not with all of the batch.
    "--enable-mixed-chunk": "prefill and decode in one step are not supported",
    "--enable-pdmux": "prefill-decode multiplexing is not supported",
    "--enable-nvidia-megakernel": _PAST_BACKEND,
    "--enable-amd-monokernel": _PAST_BACKEND,
    "--monokernel-backend": _PAST_BACKEND,
    "--enable-two-batch-overlap": _NOT_READ,
    "--enable-layernorm-sp": _NOT_WHOLE,
    "--moe-dense-tp-size": _NOT_WHOLE,
    "--enable-waterfill": _NOT_WHOLE,
    "--enable-prefill-cp": _NO_CONTEXT_PARALLEL,
    "--enable-prefill-context-parallel": _NO_CONTEXT_PARALLEL,
    "--enable-dsa-prefill-context-parallel": _NO_CONTEXT_PARALLEL,
    "--enable-nsa-prefill-context-parallel": _NO_CONTEXT_PARALLEL,
    # Weights that change, or go.
    "--cpu-offload-gb": _OFFLOADED,
    "--delete-ckpt-after-loading": "a rank that is started again reads the model again",
    "--checkpoint-engine-wait-weights-before-ready": _FIXED_WEIGHTS,
    "--modelexpress-config": _FIXED_WEIGHTS,
    "--max-ep-size": _FIXED_RANKS,
    "--enable-elastic-expert-backup": _FIXED_RANKS,
    # What is not served.
    "--language-only": _NO_DISAGGREGATION,
    "--enable-multimodal": "models are served for text",
    "--is-embedding": "models are served for text",
    "--debug-tensor-dump-input-file": "SGLang ends itself behind the first request",
}
FAMILIES = {
    "--hicache-": f"HiCache is not supported: {_PAST_INDEX}",
    "--disaggregation-": "prefill-decode disaggregation is not supported",
    "--encoder-": _NO_DISAGGREGATION,
    "--speculative-": _DRAFT_MODEL,
    "--decoupled-spec-": _DRAFT_MODEL,
    "--kv-canary": "the KV canary reads a pool that tandemkv does not have",
    "--ssl-": "readiness is asked over HTTP; put what speaks TLS before the server",
    "--dllm-": "diffusion language models are not supported",
    "--enable-torch-compile": "a compiler does not see what is selected beside the model",
    "--offload-": _OFFLOADED,
    "--elastic-ep-": _FIXED_RANKS,
    "--remote-instance-weight-loader-": _FIXED_WEIGHTS,
    "--weight-cache-": _FIXED_WEIGHTS,
}
ALLOWED = ("--speculative-algorithm", "--speculative-num-draft-tokens")
ALLOWED_FAMILY = "--speculative-ngram-"
"""Of those families; `check_speculation` refuses what they do not go with."""
ONLY = {
    "--speculative-algorithm": ("NGRAM", _DRAFT_MODEL),
    "--pp-size": ("1", _NO_PIPELINE),
    "--pipeline-parallel-size": ("1", _NO_PIPELINE),
    "--dp-size": ("1", _NO_DATA_PARALLEL),
    "--data-parallel-size": ("1", _NO_DATA_PARALLEL),
    "--attn-dp-size": ("1", _NO_DATA_PARALLEL),
    "--attention-data-parallel-size": ("1", _NO_DATA_PARALLEL),
    "--moe-dp-size": ("1", _NO_DATA_PARALLEL),
    "--moe-data-parallel-size": ("1", _NO_DATA_PARALLEL),
    "--dwdp-size": ("1", _NO_DATA_PARALLEL),
    "--attn-cp-size": ("1", _NO_CONTEXT_PARALLEL),
    "--attention-context-parallel-size": ("1", _NO_CONTEXT_PARALLEL),
    "--dcp-size": ("1", _NO_CONTEXT_PARALLEL),
    "--decode-context-parallel-size": ("1", _NO_CONTEXT_PARALLEL),
    "--moe-a2a-backend": ("none", _NOT_WHOLE),
    "--tokenizer-worker-num": ("1", "requests are checked in one HTTP process"),
    "--startup-weight-load-mode": ("serial", _FIXED_WEIGHTS),
    "--cuda-graph-backend-prefill": ("disabled", _PREFILL_GRAPHS),
}
"""The one value that may be given."""
ONLY_ON_CPU = {"--page-size": ("1", "SGLang pages larger than 1 need a GPU")}
NEVER = {"--load-format": ("remote_instance", _FIXED_WEIGHTS)}
"""A value that may not be given."""

VARIABLES = {
    "SGLANG_GRPC_PORT": _PAST_EDGE,
    "SGLANG_RUST_SERVER": _PAST_EDGE,
    "SGLANG_OPT_USE_DEEPGEMM_MEGA_MOE": _NOT_WHOLE,
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "a graph would hold what is done on the host for a step",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "its models would take the place of those that are known here",
}
"""Of SGLang's environment, which its process inherits."""
VARIABLE_FAMILIES = {
    "DUMPER_": "SGLang's dumper opens ports on which nobody needs a key, and unpickles there",
    "SGLANG_TEST_SCRIPTED_RUNTIME": "SGLang would run scripts that come over a socket",
}
