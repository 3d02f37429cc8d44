# SPDX-License-Identifier: Apache-2.0
"""Scores of cached keys under queries, per KV head.

Called by selection policies, each step for a batch (`score_keys`) and once per
request when prefill ends (`score_window`).

Kinds of keys, by the dtype of `k_pool`
    native
        ``[num_slots, num_kv_heads, head_dim]``, float or float8_e4m3fn.
    int8
        The same shape, and `k_scale` ``[num_slots, num_kv_heads]``, float, from
        `quantize_int8` or `append_int8`.
    int4 (uint8)
        Codes ``[num_pages, num_kv_heads, page_size, head_dim // 2]`` and
        `k_scale` ``[num_pages, num_kv_heads, 2, head_dim]``, float16, from
        `quantize_int4_pages` or `append_int4`, which say what they mean. A page
        is quantized when it is complete: candidates must lie in completed pages.
"""

from dataclasses import KW_ONLY, dataclass

import torch

from tandemkv.kernels.check import (
    BOOL,
    FLOAT32,
    FLOATS,
    INT8,
    INTS,
    KV_FLOATS,
    Dims,
    check_int,
    fail,
)
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.paging import key_logits, slots_of

POOLINGS = ("softmax_mean", "max_logit", "mean_logit")
# Tokens that share one maximum in the scratch, at least; also the smallest page of int4 keys.
MIN_TILE = 16
# Programs of the scan for each multiprocessor of a GPU, at most: kinds of keys take a part of it.
PROGRAMS_PER_SM = 64
MAX_SPLITS = 256
# Logits of a query window that plain torch holds at a time, in elements (64 MiB).
_MAX_WINDOW_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreScratch:
    """Buffers of `score_keys` on a GPU, reused over layers and replays of a graph."""

    logits: torch.Tensor
    """``[num_reqs, num_kv_heads, padded_width, padded_group]``, float16: logits in base 2, relative
    to their tile's maximum; or, for the choice among int4 keys, codes of a byte of their
    exponentials (`tandemkv.kernels.select`)."""
    tile_max: torch.Tensor
    """``[num_reqs, num_kv_heads, padded_width // MIN_TILE, padded_group]``, float32."""
    zero_dot: torch.Tensor
    """As `tile_max`: the query times each page's zero (int4 keys)."""
    split_lse: torch.Tensor
    """``[num_reqs, num_kv_heads, num_splits, padded_group]``, float32: log2 of the sum of
    exponentials over the part of one program."""


def padded_group(group: int) -> int:
    """Heads that the scratch has room for: a power of two, and a float32 for each token."""
    return max(2, 1 << (group - 1).bit_length())


def make_score_scratch(
    num_reqs: int, num_qo_heads: int, num_kv_heads: int, width: int, device: torch.device
) -> ScoreScratch:
    """Allocate the buffers of `score_keys`, for the largest call.

    About ``2.5 * num_reqs * num_qo_heads * width`` bytes. Calls that share it must be ordered by
    one stream.
    """
    group = padded_group(num_qo_heads // num_kv_heads)
    padded_width = -(-width // 256) * 256 + 256
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    heads = (num_reqs, num_kv_heads)
    num_splits = -(-num_sms * PROGRAMS_PER_SM // max(1, num_reqs * num_kv_heads))
    num_splits = max(2, min(num_splits, MAX_SPLITS, padded_width // 256))
    num_tiles = padded_width // MIN_TILE
    return ScoreScratch(
        logits=torch.empty((*heads, padded_width, group), dtype=torch.float16, device=device),
        tile_max=torch.empty((*heads, num_tiles, group), device=device),
        zero_dot=torch.empty((*heads, num_tiles, group), device=device),
        split_lse=torch.empty((*heads, num_splits, group), device=device),
    )


def check_keys(
    dims: Dims, k_pool: torch.Tensor, k_scale: torch.Tensor | None, page_size: int
) -> None:
    """Check keys and scales against the kinds that the top of this module lists."""
    check_int("page_size", page_size, minimum=1)
    if k_pool.dtype == torch.uint8:
        dims.check("k_pool", k_pool, "num_pages num_kv_heads page_size half_dim", (torch.uint8,))
        if dims["page_size"] != page_size or page_size < MIN_TILE or page_size & (page_size - 1):
            fail(
                "page_size", page_size,
                f"the page size of the int4 k_pool ({dims['page_size']}), a power of two >= 16",
            )  # fmt: skip
        if k_scale is None:
            fail("k_scale", None, "given, with scale and zero of int4 keys")
        dims.check("k_scale", k_scale, "num_pages num_kv_heads two head_dim", (torch.float16,))
        if dims["head_dim"] != 2 * dims["half_dim"]:
            fail("head_dim", dims["head_dim"], f"twice the {dims['half_dim']} bytes of an int4 key")
        if dims["two"] != 2:
            fail("k_scale.shape[2]", dims["two"], "2 (scale, zero)")
    else:
        dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", KV_FLOATS + INT8)
        if k_scale is not None:
            dims.check("k_scale", k_scale, "num_slots num_kv_heads", FLOATS)
        if (k_pool.dtype == torch.int8) != (k_scale is not None):
            given = None if k_scale is None else k_scale.dtype
            fail("k_scale", given, f"given if and only if k_pool ({k_pool.dtype}) is int")
        if dims["num_slots"] % page_size:
            fail("num_slots", dims["num_slots"], f"a multiple of page_size={page_size}")
    dims.check_groups("num_qo_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class KeyScan:
    """Which keys of each request's candidates ``[lo, hi)`` are scored, and how."""

    q: torch.Tensor
    """``[num_reqs, num_qo_heads, head_dim]``, float. Query head j belongs to KV head
    ``j // gqa_group_size``."""
    k_pool: torch.Tensor
    """Keys of one of the kinds listed at the top of this module."""
    slots: torch.Tensor
    """``[num_reqs, max_pages]``, int32 or int64: position p sits in slot
    ``slots[b, p // page_size] * page_size + p % page_size``. Only entries of ``[lo, hi)`` are
    read."""
    lo: torch.Tensor
    hi: torch.Tensor
    """``[num_reqs]``, int32 or int64, ``0 <= lo``, ``hi <= width``. A request with ``hi <= lo`` has
    no candidates."""
    _: KW_ONLY
    width: int
    """Width of the scores, on the host so that nothing waits for a device; at least the largest
    `hi`, at most ``max_pages * page_size``."""
    scale: float
    """Factor of the logits, usually ``head_dim ** -0.5``."""
    pooling: str = "softmax_mean"
    """How a KV head's query heads are combined. ``softmax_mean``: mean of the softmax over the
    candidates (after the softmax). ``max_logit``, ``mean_logit``: of the scaled logits."""
    k_scale: torch.Tensor | None = None
    """Scales of `k_pool`; None for native keys."""
    page_size: int = 1
    """Tokens a page; 1 makes `slots` the slot of each position. Of int4 keys their own page
    size."""
    active: torch.Tensor | None = None
    """``[num_reqs]``, bool or int8: the other requests have no candidates."""
    channels: torch.Tensor | None = None
    """``[num_kv_heads, head_dim]``, int64, contiguous: which elements of a head's queries its keys
    have; `q` is ``[num_reqs, num_qo_heads, query_dim]`` then. Not checked against `query_dim`."""

    def check(self) -> Dims:
        """Return the sizes; raise `ValueError` unless all fits together."""
        dims, channels = Dims(), self.channels
        query_dim = "head_dim" if channels is None else "query_dim"
        dims.check("q", self.q, f"num_reqs num_qo_heads {query_dim}", FLOATS)
        check_keys(dims, self.k_pool, self.k_scale, self.page_size)
        if channels is not None:
            dims.check("channels", channels, "num_kv_heads head_dim", (torch.int64,))
            if not channels.is_contiguous():
                fail("channels.stride()", channels.stride(), "contiguous")
        dims.check("slots", self.slots, "num_reqs max_pages", INTS)
        dims.check("lo", self.lo, "num_reqs", INTS)
        dims.check("hi", self.hi, "num_reqs", INTS)
        check_int("width", self.width, minimum=0, maximum=dims["max_pages"] * self.page_size)
        if self.pooling not in POOLINGS:
            fail("pooling", repr(self.pooling), f"one of {POOLINGS}")
        if self.active is not None:
            dims.check("active", self.active, "num_reqs", BOOL + INT8)
        return dims


def _check_buffers(
    dims: Dims, width: int, out: torch.Tensor | None, scratch: ScoreScratch | None
) -> None:
    if out is not None:
        dims.check("out", out, "num_reqs num_kv_heads out_width", FLOAT32)
        if dims["out_width"] < width or not out.is_contiguous():
            fail("out", tuple(out.shape), f"contiguous and at least width={width} wide")
    if scratch is not None:
        logits = scratch.logits
        group = dims["num_qo_heads"] // dims["num_kv_heads"]
        if (
            logits.shape[0] < dims["num_reqs"]
            or logits.shape[1] != dims["num_kv_heads"]
            or logits.shape[2] < width + 256
            or logits.shape[3] != padded_group(group)
        ):
            fail("scratch", tuple(logits.shape), "made by make_score_scratch for these sizes")


def score_keys(
    keys: KeyScan, *, out: torch.Tensor | None = None, scratch: ScoreScratch | None = None
) -> torch.Tensor:
    """Score each request's candidate positions.

    Parameters
    ----------
    keys : KeyScan
        What is read, and how it is scored.
    out : torch.Tensor, optional
        ``[num_reqs, num_kv_heads, >= width]``, float32, contiguous: written and
        returned. What stands in it outside ``[lo, hi)`` is undefined.
    scratch : ScoreScratch, optional
        Buffers of the GPU version, from `make_score_scratch`; else allocated.

    Returns
    -------
    torch.Tensor
        `out`, or ``[num_reqs, num_kv_heads, width]``, float32, with ``-inf`` outside ``[lo, hi)``.

    Notes
    -----
    On a GPU the last dimension of `k_pool` and of `slots` must be dense, of int4 scales the last
    two; one launch, two for ``softmax_mean``; the grid depends on sizes only, so a captured graph
    may be replayed with other `lo`, `hi` and `slots` (these are not checked there). Queries are
    rounded to the dtype that tensor cores multiply in: the keys' own for native ones (float32 stays
    float32), float16 after division by the head's largest element for quantized ones and
    float8_e4m3fn. No key is dequantized: an int8 scale multiplies the logit; an int4 scale is
    folded into the query, page by page, and the query times the zeros is added. Between the two
    passes of ``softmax_mean`` logits stand in float16 relative to the maximum of at most 64 tokens.
    In plain torch it loops over requests and reads `lo` and `hi` on the host.
    """
    _check_buffers(keys.check(), keys.width, out, scratch)
    q, width = keys.q, keys.width
    if uses_triton(q.device):
        from tandemkv.kernels.triton_ops.score import score_keys as on_gpu

        return on_gpu(keys, out=out, scratch=scratch)
    num_reqs, num_kv_heads = len(q), keys.k_pool.shape[1]
    grouped = (q.float() * keys.scale).reshape(num_reqs, num_kv_heads, -1, q.shape[2])
    if keys.channels is not None:
        grouped = grouped.gather(3, keys.channels[:, None].expand(*grouped.shape[:3], -1))
    scores = out
    if scores is None:
        scores = grouped.new_full((num_reqs, num_kv_heads, width), float("-inf"))
    limit = min(width, keys.slots.shape[1] * keys.page_size)
    hi = keys.hi if keys.active is None else torch.where(keys.active != 0, keys.hi, 0)
    for req, (first, last) in enumerate(zip(keys.lo.tolist(), hi.tolist(), strict=True)):
        if last <= first:
            continue
        if first < 0 or last > limit:
            fail(f"[lo, hi) of request {req}", (first, last), f"in [0, {limit}] (width, max_pages)")
        row = slots_of(keys.slots[req], first, last, keys.page_size)
        logits = key_logits(grouped[req], keys.k_pool, row, keys.k_scale)  # [H, G, n]
        scores[req, :, first:last] = pool_heads(logits, keys.pooling)
    return scores


def pool_heads(logits: torch.Tensor, pooling: str) -> torch.Tensor:
    """Combine the query heads of each KV head, ``[H, n]`` of ``[H, G, n]``; see `KeyScan`."""
    if pooling == "max_logit":
        return logits.amax(dim=1)
    return (logits if pooling == "mean_logit" else logits.softmax(dim=-1)).mean(dim=1)


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
    """Score one request's candidates under a window of causal queries.

    Each query takes a softmax over the candidates at or before its own
    position; the result is the mean over queries and over each head group.

    Parameters
    ----------
    q_window : torch.Tensor
        ``[window_len, num_qo_heads, head_dim]``, float, ``window_len > 0``.
    k_pool, k_scale, scale, page_size
        As in `KeyScan`.
    slots_row : torch.Tensor
        ``[num_pages]``, int32 or int64. As one row of `slots` in `KeyScan`.
    lo, hi : int
        Candidates are ``[lo, hi)``, ``0 <= lo``, ``0 <= hi``, at most
        ``num_pages * page_size``; none if ``hi <= lo``.
    q_positions : torch.Tensor
        ``[window_len]``, int32 or int64. Logical positions of the queries. One
        that sees no candidate contributes zeros.

    Returns
    -------
    torch.Tensor
        ``[num_kv_heads, hi]``, float32; ``-inf`` below `lo`, 0 where no query sees the position.

    Notes
    -----
    On a GPU the last dimension of `k_pool` must be dense, of int4 scales the last two; two
    launches. Each reads the keys once, and logits stay in registers: the first leaves the queries'
    sums of exponentials, for a bounded number of parts, and the second the scores. Queries are
    rounded to the dtype that tensor cores multiply in: the keys' own for native ones, float16
    relative to the largest element for quantized ones and float8_e4m3fn (which is exact for
    bfloat16 queries but for what is tiny). int4 keys are dequantized to float16 in registers; an
    int8 scale multiplies the logit. Nothing is compiled again for another length of the prompt.
    """
    dims = Dims()
    dims.check("q_window", q_window, "window_len num_qo_heads head_dim", FLOATS)
    check_keys(dims, k_pool, k_scale, page_size)
    dims.check("slots_row", slots_row, "num_row_pages", INTS)
    dims.check("q_positions", q_positions, "window_len", INTS)
    check_int("window_len", dims["window_len"], minimum=1)
    check_int("lo", lo, minimum=0)
    check_int("hi", hi, minimum=0, maximum=dims["num_row_pages"] * page_size)
    if uses_triton(q_window.device):
        from tandemkv.kernels.triton_ops.score import score_window as on_gpu

        return on_gpu(
            q_window, k_pool, slots_row, lo, hi, q_positions, scale=scale, k_scale=k_scale,
            page_size=page_size,
        )  # fmt: skip
    window_len, num_qo_heads, head_dim = q_window.shape
    num_kv_heads = k_pool.shape[1]
    group = num_qo_heads // num_kv_heads
    scores = k_pool.new_full((num_kv_heads, hi), float("-inf"), dtype=torch.float32)
    if lo >= hi:
        return scores
    grouped = (q_window.float() * scale).reshape(window_len, num_kv_heads, group, head_dim)
    positions = torch.arange(lo, hi, device=q_window.device)
    total = scores.new_zeros((num_kv_heads, hi - lo))
    row = slots_of(slots_row, lo, hi, page_size)
    num_per_chunk = max(1, _MAX_WINDOW_LOGITS // (num_qo_heads * (hi - lo)))
    for start in range(0, window_len, num_per_chunk):
        part = grouped[start : start + num_per_chunk].transpose(0, 1)  # [H, w, G, D]
        num_queries = part.shape[1]
        logits = key_logits(part.reshape(num_kv_heads, -1, head_dim), k_pool, row, k_scale).view(
            num_kv_heads, num_queries, group, -1
        )
        hidden = positions > q_positions[start : start + num_queries, None]  # [w, n]
        logits.masked_fill_(hidden[:, None, :], float("-inf"))
        probs = torch.softmax(logits, dim=-1)
        probs.masked_fill_(hidden.all(dim=-1)[:, None, None], 0.0)  # the softmax of nothing
        total += probs.sum(dim=(1, 2))
    scores[:, lo:] = total / (window_len * group)
    return scores
