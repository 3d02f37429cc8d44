# SPDX-License-Identifier: Apache-2.0
"""Paged keys of every kind, and what their scores are in float64."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from tolerances import Tolerance

from tandemkv.kernels.quantize import quantize_int4_pages, quantize_int8
from tandemkv.kernels.score import KeyScan

NATIVE = ("float32", "float16", "bfloat16")
KINDS = (*NATIVE, "int8", "int4")
# Scores are divided by their `magnitude`; queries of quantized keys are rounded to float16, as are
# logits between the two passes of softmax_mean.
ON_GPU = Tolerance(abs_error=1e-3, rel_error=6e-3, cosine_gap=1e-5)
EXACT_LOGITS = Tolerance(abs_error=2e-5, rel_error=2e-5, cosine_gap=1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A pool with page tables, and the same keys in float64 by slot."""

    q: torch.Tensor  # [B, Hq, D]
    k_pool: torch.Tensor
    k_scale: torch.Tensor | None
    table: torch.Tensor  # [B, max_pages]
    by_slot: torch.Tensor  # [num_slots, H, D], float64
    page_size: int

    def row(self, req: int, lo: int, hi: int) -> torch.Tensor:
        """Keys of positions [lo, hi) of a request: [n, H, D]."""
        positions = torch.arange(lo, hi, device=self.table.device)
        pages = self.table[req].long()[positions // self.page_size]
        return self.by_slot[pages * self.page_size + positions % self.page_size]


def make_keys(
    kind: str, *, num_reqs: int, heads: int, group: int, dim: int, page_size: int,
    num_pages: int, device: str = "cpu",
) -> Keys:  # fmt: skip
    num_slots = num_pages * page_size
    dtype = getattr(torch, kind) if kind in NATIVE else torch.float32
    keys = torch.randn(num_slots, heads, dim) * torch.rand(dim).add(0.2) + torch.randn(dim)
    pool, scale, wide = keys.to(dtype), None, keys.to(dtype).double()
    if kind == "int8":
        pool, scale = quantize_int8(keys)
        wide = pool.double() * scale.double()[..., None]
    elif kind == "int4":
        pool = torch.zeros(num_pages, heads, page_size, dim // 2, dtype=torch.uint8)
        scale = torch.zeros(num_pages, heads, 2, dim, dtype=torch.float16)
        quantize_int4_pages(keys, torch.arange(num_pages), pool, scale)
        codes = torch.cat([pool & 15, pool >> 4], dim=-1).double()
        wide = codes * scale[:, :, :1].double() + scale[:, :, 1:].double()
        wide = wide.transpose(1, 2).reshape(num_slots, heads, dim)
    max_pages = num_pages // num_reqs
    table = torch.randperm(num_pages)[: num_reqs * max_pages].view(num_reqs, max_pages).int()
    q = torch.randn(num_reqs, heads * group, dim).to(dtype) * 2
    return Keys(
        q=q.to(device), k_pool=pool.to(device), k_scale=None if scale is None else scale.to(device),
        table=table.to(device), by_slot=wide.to(device), page_size=page_size,
    )  # fmt: skip


def scan_of(keys: Keys, lo: torch.Tensor, hi: torch.Tensor, **options: Any) -> KeyScan:
    """Return the arguments of a scan of `keys`; `options` are those that these do not say."""
    return KeyScan(
        keys.q, keys.k_pool, keys.table, lo, hi, k_scale=keys.k_scale, page_size=keys.page_size,
        **options,
    )  # fmt: skip


def among_others(q: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries that hold `q` ``[B, Hq, D]`` among other elements, and where: ``[H, D]``."""
    num_reqs, num_qo_heads, dim = q.shape
    wide = torch.randn(num_reqs, heads, num_qo_heads // heads, 2 * dim).to(q)
    channels = torch.stack([torch.randperm(2 * dim)[:dim] for _ in range(heads)]).to(q.device)
    index = channels[:, None].expand(num_reqs, -1, wide.shape[2], -1)
    return wide.scatter(3, index, q.view(*wide.shape[:3], dim)).flatten(1, 2), channels


def expected(keys: Keys, req: int, lo: int, hi: int, pooling: str, scale: float) -> torch.Tensor:
    """Scores [H, hi - lo] of one request in float64."""
    rows = keys.row(req, lo, hi).permute(1, 2, 0)  # [H, D, n]
    grouped = keys.q[req].double().view(rows.shape[0], -1, rows.shape[1])
    logits = grouped @ rows * scale  # [H, G, n]
    if pooling == "softmax_mean":
        return logits.softmax(-1).mean(1)
    return logits.amax(1) if pooling == "max_logit" else logits.mean(1)


def magnitude(keys: Keys, req: int, lo: int, hi: int, pooling: str, scale: float) -> torch.Tensor:
    """What rounding errors of the scores are relative to: not a sum that may cancel."""
    if pooling == "softmax_mean":
        return expected(keys, req, lo, hi, pooling, scale).max()
    rows = keys.row(req, lo, hi).abs().permute(1, 2, 0)
    grouped = keys.q[req].double().abs().view(rows.shape[0], -1, rows.shape[1])
    return (grouped @ rows).max() * scale


def expected_window(
    keys: Keys, q_window: torch.Tensor, lo: int, hi: int, positions: list[int], scale: float
) -> torch.Tensor:
    """Scores [H, hi] of the first request under a window of causal queries, in float64."""
    rows = keys.row(0, lo, hi)  # [n, H, D]
    grouped = q_window.double().view(len(positions), rows.shape[1], -1, rows.shape[2])
    logits = torch.einsum("whgd,nhd->whgn", grouped, rows) * scale
    at = torch.arange(lo, hi, device=rows.device)
    hidden = at > torch.tensor(positions, device=rows.device)[:, None]
    logits.masked_fill_(hidden[:, None, None], -math.inf)
    probs = logits.softmax(-1).nan_to_num(0.0)  # a query that sees nothing
    scores = probs.new_full((rows.shape[1], hi), -math.inf)
    scores[:, lo:] = probs.mean(dim=(0, 2))
    return scores
