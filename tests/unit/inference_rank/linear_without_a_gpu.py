# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for SGLang's kernels of gated delta nets, which a CPU without AMX has none of.

Each follows the definition of its kernel token by token, in float32, for stock runs and for ours.
States ``[slots, Hv, Dv, Dk]`` and windows of the convolution ``[slots, channels, width - 1]`` are
those of SGLang's own pool, which SGLang's own backend hands over.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm


def install() -> None:
    """Put them where SGLang's `GDNAttnBackend` imports them from."""
    module: Any = types.ModuleType("sgl_kernel.mamba")
    module.causal_conv1d_fn_cpu = _convolve_prompts
    module.causal_conv1d_update_cpu = _convolve_tokens
    module.chunk_gated_delta_rule_cpu = _rule_for_prompts
    sys.modules[module.__name__] = module
    install_operators()
    FusedRMSNormGated.forward = RMSNorm.forward = _gated_norm
    registry: Any = sys.modules.get("sglang.srt.models.registry")
    if registry is not None and "sglang.srt.models.qwen3_5" not in sys.modules:
        # It has passed over the models that look for them when they are imported.
        registry.import_model_classes.cache_clear()
        registry.ModelRegistry.register("sglang.srt.models", overwrite=True)


def install_operators() -> None:
    """Put those that SGLang looks for among torch's operators there, some when it is imported."""
    operators: Any = torch.ops.sgl_kernel
    operators.fused_gdn_gating_cpu = _gates
    operators.fused_sigmoid_gating_delta_rule_update_cpu = _rule_for_tokens
    operators.fused_qkvzba_split_reshape_cat_contiguous_cpu = _split
    operators.fused_qk_gemma_rmsnorm_cpu = None  # of models without a gate of each query head
    operators.fused_qk_gemma_rmsnorm_with_gate_cpu = _norm_of_heads
    operators.fused_sigmoid_mul_cpu = _gate_of_heads


def _convolve_prompts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str,
    conv_states: torch.Tensor, has_initial_state: torch.Tensor, cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Return ``x [channels, n]`` convolved along each request's tokens; their last are kept."""
    found, starts = torch.empty_like(x), query_start_loc.tolist()
    for i, (start, end) in enumerate(pairwise(starts)):
        window = conv_states[cache_indices[i]]
        before = window.to(x.dtype) * has_initial_state[i]
        found[:, start:end] = _convolve(x[:, start:end], before, window, weight, bias, activation)
    return found


def _convolve_tokens(
    x: torch.Tensor, conv_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str, *, conv_state_indices: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Return ``x [B, channels]``, the newest token of each request, convolved likewise."""
    found = torch.empty_like(x)
    for i, row in enumerate(conv_state_indices.tolist()):
        if row >= 0:  # else it is padding
            window, own = conv_states[row], x[i, :, None]
            before = window.to(x.dtype)
            found[i] = _convolve(own, before, window, weight, bias, activation)[:, 0]
    return found


def _convolve(
    x: torch.Tensor, before: torch.Tensor, window: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, activation: str,
) -> torch.Tensor:  # fmt: skip
    assert activation == "silu"
    whole = torch.cat((before, x), 1)
    found = F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
    window.copy_(whole[:, -window.shape[1] :])
    return F.silu(found)


def _gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the decay, and the step, ``[1, n, Hv]`` each."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _rule_for_prompts(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor,
    head_first: bool, use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:  # fmt: skip
    """Return what each of n tokens reads ``[1, n, Hv, Dv]``; states are left as they are then."""
    assert use_qk_l2norm_in_kernel
    assert not head_first
    found, starts = torch.empty_like(v), cu_seqlens.tolist()
    for i, row in enumerate(initial_state_indices.tolist()):
        own = slice(starts[i], starts[i + 1])
        parts = (x[0, own] for x in (q, k, v, g, beta))
        found[0, own] = _delta_rule(*parts, state=initial_state[row])
    return found, None, None


def _rule_for_tokens(
    *, A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor, use_qk_l2norm_in_kernel: bool, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Return what the newest token of each request reads ``[1, B, Hv, Dv]``."""
    assert use_qk_l2norm_in_kernel
    g, beta = _gates(A_log, a, b, dt_bias)
    found = torch.zeros_like(v)
    for i, row in enumerate(initial_state_indices.tolist()):
        if row >= 0:
            parts = (x[0, i : i + 1] for x in (q, k, v, g, beta))
            found[0, i] = _delta_rule(*parts, state=initial_state_source[row])[0]
    return found


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    *, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return what n tokens read ``[n, Hv, Dv]`` of ``state [Hv, Dv, Dk]``, which they write first.

    ``q, k [n, Hk, Dk]``, ``v [n, Hv, Dv]``, ``g, beta [n, Hv]``.
    """
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(x.float()).repeat_interleave(group, 1) for x in (q, k))
    memory, found = state.float(), []
    for query, key, value, decay, step in zip(q, k, v.float(), g.exp(), beta, strict=True):
        memory = memory * decay[:, None, None]
        error = (value - (memory @ key[..., None])[..., 0]) * step[:, None]
        memory = memory + error[..., None] * key[:, None]
        found.append((memory @ query[..., None])[..., 0])
    state.copy_(memory)
    return (torch.stack(found) * k.shape[-1] ** -0.5).to(v.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return an RMS norm of ``x [n, D]``, times a gate."""
    assert self.activation in ("silu", "swish")  # two names of one function
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight.float() * normed * F.silu(gate.float())).to(x.dtype)


def _split(
    qkvz: torch.Tensor, ba: torch.Tensor, num_key_heads: int, num_value_heads: int, key_dim: int,
    value_dim: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return ``[n, channels]`` that are convolved, z ``[n, Hv, Dv]``, and b and a ``[n, Hv]``."""
    values = num_value_heads * value_dim
    qkv, z = qkvz.split([2 * num_key_heads * key_dim + values, values], -1)
    b, a = ba.chunk(2, -1)
    z = z.reshape(len(z), num_value_heads, value_dim)
    return qkv.contiguous(), z, b.contiguous(), a.contiguous()


def _norm_of_heads(
    query_and_gate: torch.Tensor, key: torch.Tensor, query_weight: torch.Tensor,
    key_weight: torch.Tensor, eps: float, head_dim: int, num_heads: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return query and key, each head normalised by weights that count from one, and the gate."""
    query, gate = query_and_gate.view(-1, num_heads, 2 * head_dim).chunk(2, -1)
    heads = (query, query_weight), (key.reshape(len(key), -1, head_dim), key_weight)
    query, key = (F.rms_norm(x, (head_dim,), 1.0 + weight, eps) for x, weight in heads)
    return query.flatten(1), key.flatten(1), gate.flatten(1)


def _gate_of_heads(out: torch.Tensor, gate: torch.Tensor, *, inplace: bool = True) -> torch.Tensor:
    """Return what was attended to, times the sigmoid of a gate of its shape."""
    assert inplace
    return out.mul_(gate.sigmoid())
