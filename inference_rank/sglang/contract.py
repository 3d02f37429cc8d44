# SPDX-License-Identifier: Apache-2.0
"""Everything of SGLang that the plugin touches, checked before it touches it.

SGLang logs and swallows errors of plugins; a renamed target would leave a server that runs
without us. So: a version that is taken, every symbol present, every hook proven applied.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence

from tandemkv.cache_rank.protocol.errors import ContractError

from . import versions

SYMBOLS = versions.parsed_symbols("""
sglang.srt.plugins.hook_registry
    HookRegistry.register(target, hook, hook_type)
    HookRegistry.apply_hooks
sglang.srt.server_args
    add_attention_backend_choices
sglang.srt.layers.attention.attention_registry
    register_attention_backend(name)
sglang.srt.layers.attention.base_attn_backend
    AttentionBackend.init_forward_metadata(forward_batch)
sglang.srt.layers.attention.flashinfer_backend
    # With samples FlashInfer's wrapper is asked for its log-sum-exp, past `forward_decode`.
    FlashInferAttnBackend._get_wrapper_idx(layer)
    FlashInferAttnBackend._kv_write_scales(layer)
    # Between two GPUs the list of slots that FlashInfer was planned with is replaced.
    PrefillMetadata(prefill_wrappers, use_ragged)
sglang.srt.mem_cache.memory_pool
    KVWriteLoc
    HybridLinearKVPool(full_attention_layer_ids, full_kv_pool_class)
    MHATokenToKVPool._create_buffers
    MHATokenToKVPool._build_kv_buffer_descs
    MHATokenToKVPool._init_data_ptrs_and_strides
    ReqToTokenPool.clear
    ReqToTokenPool.available_size
sglang.srt.layers.attention.torch_native_backend
    # For models with attention sinks.
    TorchNativeAttnBackend(model_runner)
sglang.srt.layers.layernorm
    Gemma3RMSNorm(dim, eps)
    GemmaRMSNorm(hidden_size, eps)
    # Recognised by their names; without them queries are predicted module by module.
    RMSNorm(hidden_size, eps, var_hidden_size)
sglang.srt.managers.tokenizer_manager
    TokenizerManager.convert_logprob_style(meta_info, state, top_logprobs_num, token_ids_logprob,
        return_text_in_logprobs, recv_obj, recv_obj_index)
    TokenizerManager.add_logprob_to_meta_info(meta_info, state, top_logprobs_num, token_ids_logprob,
        return_text_in_logprobs)
    TokenizerManager._tokenize_texts(texts)
    TokenizerManager.pause_generation
    ServerStatus.Starting
    SignalHandler.sigterm_handler
    SignalHandler.running_phase_sigquit_handler
    TokenizerManager._dispatch_to_scheduler(obj)
    TokenizerManager.create_abort_task(obj)
sglang.srt.entrypoints.engine
    _set_envs_and_config(server_args)
sglang.srt.utils.common
    support_triton(backend)
sglang.srt.utils.hf_transformers.tokenizer
    get_tokenizer(tokenizer_name, tokenizer_mode, trust_remote_code, tokenizer_backend)
sglang.srt.utils.auth
    decide_request_auth(path, api_key)
    AuthDecision(allowed, error_status_code)
sglang.srt.mem_cache.kv_cache_configurator
    KVCacheConfigurator._build_mha_kv_pool(max_total_num_tokens, mha_pool_class)
    # For models some of whose layers are linear attention.
    KVCacheConfigurator._build_hybrid_linear_kv_pool(max_total_num_tokens, mha_pool_class)
    KVCacheConfigurator._build_token_to_kv_pool(req_to_token_pool)
sglang.srt.layers.attention.hybrid_linear_attn_backend
    HybridLinearAttnBackend(full_attn_backend, linear_attn_backend)
sglang.srt.mem_cache.allocator.base
    BaseTokenToKVPoolAllocator.available_size
    BaseTokenToKVPoolAllocator.free_segment(free_index, start_pos)
sglang.srt.model_executor.pool_configurator
    DefaultPoolConfigurator._compute_cell_size
sglang.srt.managers.scheduler_components.batch_result_processor
    release_kv_cache(req, tree_cache)
sglang.srt.managers.scheduler
    Scheduler.run_batch(batch)
    Scheduler.process_input_requests(recv_reqs)
    Scheduler.process_batch_result(batch, result)
    Scheduler.abort_request(recv_req)
    Scheduler.pause_generation(recv_req)
    Scheduler.continue_generation(recv_req)
    Scheduler.maybe_send_health_check_signal
    Scheduler._add_request_to_queue(req)
    Scheduler.is_fully_idle
    Scheduler.on_idle
    Scheduler.release_host_resources
    Scheduler.flush_cache(empty_cache)
sglang.srt.managers.schedule_batch
    ScheduleBatch.cumulate_penalty_output_tokens
    ScheduleBatch.init_new(reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache,
        model_config, enable_overlap, spec_algorithm)
    FINISH_ABORT(message, status_code, err_type)
sglang.srt.managers.overlap_utils
    FutureMap.stash
    RelayPayload(bonus_tokens)
sglang.srt.managers.utils
    GenerationBatchResult(next_token_ids, copy_done)
sglang.srt.sampling.sampling_batch_info
    SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    SamplingBatchInfo.apply_logits_bias(logits)
sglang.srt.layers.radix_attention
    RadixAttention.forward(forward_batch)
sglang.srt.managers.load_snapshot
    shm_path_for
sglang.srt.managers.io_struct
    AbortReq
    ShutdownReq
sglang.srt.distributed.bootstrap
    init_distributed_environment(world_size, distributed_init_method, backend)
torch.distributed
    # SGLang calls both through `torch.distributed`, so that a hook on them is seen.
    new_group(ranks, backend)
    monitored_barrier(group)
    Backend.register_backend(name, func, devices)
sglang.srt.model_executor.runner.decode_cuda_graph_runner
    DecodeCudaGraphRunner.capture_one_shape(size, forward, stream_idx, variant_label)
    DecodeCudaGraphRunner._resolve_lora_variant(forward_batch)
    DecodeCudaGraphRunner.capture
    DecodeCudaGraphRunner._make_graph_key(size, stream_idx, variant_label)
sglang.srt.model_executor.runner_backend.full_cuda_graph_backend
    FullCudaGraphBackend.replay(shape_key, static_forward_batch)
    FullCudaGraphBackend.replay_session
    # Both use `_capture_stream`, which is replaced while some steps are captured.
    FullCudaGraphBackend.capture_session(stream)
    FullCudaGraphBackend.capture_one(shape_key, forward_fn)
sglang.srt.layers.rotary_embedding.base
    RotaryEmbedding(head_size, rotary_dim, is_neox_style)
    LinearScalingRotaryEmbedding(head_size)
sglang.srt.layers.rotary_embedding.rope_variant
    Llama3RotaryEmbedding(head_size)
    DynamicNTKScalingRotaryEmbedding(head_size)
sglang.srt.layers.rotary_embedding.yarn
    YaRNScalingRotaryEmbedding(head_size)
sglang.srt.layers.rotary_embedding.mrope
    MRotaryEmbedding(head_size)
    YaRNScalingMRotaryEmbedding(head_size)
sglang.srt.models.minimax_m2
    MiniMaxM2RMSNormTP(hidden_size, eps)
sglang.srt.configs.model_config
    ModelConfig.__init__(enable_multimodal)
sglang.srt.models.utils
    enable_fused_set_kv_buffer(forward_batch)
sglang.srt.runtime_context
    get_parallel
sglang.srt.entrypoints.http_server
    app.build_middleware_stack
    _setup_and_run_http_server(server_args, tokenizer_manager, execute_warmup_func)
sglang.srt.entrypoints.openai.protocol
    ReasoningEffortTier
sglang.srt.entrypoints.openai.serving_base
    OpenAIServingBase.handle_request(request, raw_request)
    OpenAIServingBase._convert_to_internal_request(request, raw_request)
sglang.srt.entrypoints.openai.serving_tokenize
    OpenAIServingTokenize._handle_non_streaming_request
    OpenAIServingDetokenize._handle_non_streaming_request
sglang.srt.utils.cudacore_pyspy_dump_utils
    collect_scheduler_processes
sglang.srt.layers.sampler
    Sampler.forward(logits_output, sampling_info)
sglang.srt.constrained.base_grammar_backend
    GrammarMask.apply(logits)
""")
"""Symbol -> parameters that we rely on, in every version that is taken."""


def check_contract() -> None:
    """Check SGLang's version and every symbol that the plugin uses.

    Raises `ContractError`, which names the version, or all that it lacks.
    """
    version = versions.installed()
    number = versions.check_version(version)
    wanted = SYMBOLS | versions.symbols_of(number)
    lacking = [text for name, needed in wanted.items() if (text := _lacking(name, needed))]
    if lacking:
        raise ContractError(
            f"sglang=={version} lacks {'; '.join(lacking)}: install sglang=={version} anew, or "
            f"{versions.OLDEST}"
        )


def _lacking(symbol: str, parameters: Sequence[str]) -> str | None:
    try:
        found = pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError) as error:
        return f"{symbol} ({error})"
    if not parameters:
        return None
    have = inspect.signature(found).parameters
    accepts_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in have.values())
    missing = [name for name in parameters if name not in have and not accepts_any]
    return f"{', '.join(missing)} in {symbol}, which has {list(have)}" if missing else None


def check_hooks_applied(targets: Sequence[str]) -> None:
    """Prove that SGLang applied every hook of ours in this process.

    Raises `ContractError`, which names the targets that are not hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in targets if target not in HookRegistry._patched]
    if missing:
        raise ContractError(
            f"SGLang did not apply the hooks on {', '.join(missing)}; see its log above"
        )
