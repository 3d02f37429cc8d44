# SPDX-License-Identifier: Apache-2.0
"""`score_window` on a GPU: chunks of tokens, twice, in torch; no host sync."""

import torch

from tandemkv.kernels.reference.paging import key_rows, slots_of

# Logits of a chunk of tokens and their keys, in elements (64 MiB each).
_MAX_ELEMENTS = 1 << 24
_ROW = 64


def score_window(
    q_window: torch.Tensor,
    k_pool: torch.Tensor,
    slots_row: torch.Tensor,
    lo: int,
    hi: int,
    q_positions: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:
    """Score one request for seeding; see `tandemkv.kernels.score.score_window`."""
    window_len, num_qo_heads, head_dim = q_window.shape
    num_kv_heads = k_pool.shape[1]
    group = num_qo_heads // num_kv_heads
    # Whole 256 bytes a row: Triton compiles a kernel again for strides that 16 does not divide.
    width = -(-hi // _ROW) * _ROW
    scores = q_window.new_full((num_kv_heads, width), float("-inf"), dtype=torch.float32)[:, :hi]
    if lo >= hi:
        return scores
    grouped = (q_window.float() * scale).view(window_len, num_kv_heads, group, head_dim)
    queries = grouped.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [H, w * G, D]
    limits = q_positions[:, None].expand(-1, group).reshape(1, -1, 1)
    num_per_token = max(window_len * num_qo_heads, num_kv_heads * head_dim)
    chunk = max(1, _MAX_ELEMENTS // num_per_token)

    def logits_of(start: int, end: int) -> torch.Tensor:
        index = slots_of(slots_row, start, end, page_size).long()
        keys = key_rows(k_pool, index, k_scale)
        logits = torch.bmm(queries, keys.permute(1, 2, 0))  # [H, w * G, n]
        positions = torch.arange(start, end, device=logits.device)
        return logits.masked_fill_(positions > limits, float("-inf"))

    bounds = [(start, min(start + chunk, hi)) for start in range(lo, hi, chunk)]
    lse = queries.new_full(queries.shape[:2], float("-inf"))
    for start, end in bounds:
        lse = torch.logaddexp(lse, torch.logsumexp(logits_of(start, end), dim=-1))
    # A query that sees nothing has weights of exp(-inf - inf) = 0.
    lse.masked_fill_(lse == float("-inf"), float("inf"))
    for start, end in bounds:
        weights = torch.exp(logits_of(start, end) - lse[..., None])
        scores[:, start:end] = weights.sum(dim=1) / (window_len * group)
    return scores
