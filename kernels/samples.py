# SPDX-License-Identifier: Apache-2.0
"""Evenly spaced tokens that stand for what is not resident.

A softmax over the best tokens alone gives them the weight of all others, too. A few tokens of
regular distance, whatever they score, attended to beside the best ones and each counted as often
as there are tokens that it stands for, make up for that (decision record 15; MagicPIG,
arXiv:2410.16179, names the bias, vAttention, arXiv:2510.05688, samples what top-k leaves out).

Which tokens these are follows from the number of candidates alone, so both ranks know without a
word: `sample_offsets`. Of n candidates and S samples, with s the largest power of two such that
``S * s < n``, they are the multiples of s below ``S * s``, of which the odd ones, one after the
other, give their place to the multiples of 2 s from there on. So one sample moves every 2 s tokens.
"""

from __future__ import annotations

import torch

from tandemkv.kernels.check import (
    BOOL,
    FLOAT32,
    FLOATS,
    INT32,
    INT64,
    INTS,
    KV_FLOATS,
    Dims,
    check_counts,
    check_int,
    fail,
)
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.paging import rows_at
from tandemkv.kernels.slot_rules import latest_slots

MOST_SAMPLES = 1024
SPLIT_SAMPLES = 64
"""Samples that one program of a GPU attends to. One after the other they take 4 us each 128."""


def make_sample_scratch(
    num_reqs: int, num_qo_heads: int, num_samples: int, head_dim: int, device: torch.device | str
) -> torch.Tensor:
    """Allocate what `attend_samples` works in on a GPU, for the largest call of one stream.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_qo_heads, num_splits, head_dim + 2]``, float32: of each split the sum, the
        largest logit and the softmax's denominator.
    """
    splits = -(-num_samples // SPLIT_SAMPLES)
    return torch.empty((num_reqs, num_qo_heads, splits, head_dim + 2), device=device)


def check_num_samples(num_samples: int) -> None:
    """Raise `ValueError` if `num_samples` is odd or out of ``[2, MOST_SAMPLES]``."""
    if num_samples % 2 or not 2 <= num_samples <= MOST_SAMPLES:
        fail("num_samples", num_samples, f"even, 2 to {MOST_SAMPLES}")


def load_sample_slots(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_sink: int,
    num_recent: int,
) -> None:
    """List where the samples of each request are in a pool.

    Candidates are ``[num_sink, length - num_recent)``.

    Parameters
    ----------
    rows, lengths : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request, and its tokens.
    req_to_token : torch.Tensor
        ``[num_rows, context]``, int32 or int64. Slot of each position.
    slots : torch.Tensor
        ``[max_batch, num_samples]``, int32. The first `num_reqs` rows are written; 0 where there
        are fewer candidates.
    num_sink, num_recent : int
        See above.
    """
    dims = Dims()
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("lengths", lengths, "num_reqs", INTS)
    dims.check("req_to_token", req_to_token, "num_rows context", INTS)
    dims.check("slots", slots, "max_batch num_samples", INT32)
    if len(rows) > len(slots):
        fail("len(rows)", len(rows), f"<= max_batch={len(slots)}")
    check_num_samples(dims["num_samples"])
    check_int("num_sink", num_sink, minimum=0)
    check_int("num_recent", num_recent, minimum=1)
    if uses_triton(rows.device):
        from tandemkv.kernels.triton_ops.samples import load_sample_slots as on_gpu

        return on_gpu(rows, lengths, req_to_token, slots, num_sink=num_sink, num_recent=num_recent)
    count = (lengths.long() - num_recent - num_sink).clamp(min=0)
    offsets, _ = sample_offsets(count, slots.shape[1])
    found = req_to_token[rows.long()[:, None], (offsets + num_sink).clamp(min=0)]
    slots[: len(rows)] = torch.where(offsets >= 0, found, 0).to(torch.int32)


def load_sample_moves(
    lengths: torch.Tensor,
    moves: torch.Tensor,
    sources: torch.Tensor,
    *,
    num_samples: int,
    num_sink: int,
    num_resident: int,
    num_recent: int,
    num_dense: int,
) -> None:
    """Say which sample the token becomes that has just left the latest ones, and where it is.

    For resident sets that are tensors of their own; slots are those of
    `tandemkv.kernels.step_tables.load_ring`, before the step's token is written.

    Parameters
    ----------
    lengths : torch.Tensor
        ``[num_reqs]``, int32 or int64.
    moves, sources : torch.Tensor
        ``[max_batch]``, int64. Sample, -1 if it becomes none, and its slot in the resident set; the
        first `num_reqs` are written.
    num_samples, num_sink, num_resident, num_recent, num_dense : int
        See `load_sample_slots` and `tandemkv.kernels.step_tables.load_attended`.
    """
    dims = Dims()
    dims.check("lengths", lengths, "num_reqs", INTS)
    dims.check("moves", moves, "max_batch", INT64)
    dims.check("sources", sources, "max_batch", INT64)
    if len(lengths) > len(moves):
        fail("len(lengths)", len(lengths), f"<= max_batch={len(moves)}")
    check_num_samples(num_samples)
    check_counts(num_sink=num_sink, num_resident=num_resident, num_dense=num_dense)
    check_int("num_recent", num_recent, minimum=1)
    if uses_triton(lengths.device):
        from tandemkv.kernels.triton_ops.samples import load_sample_moves as on_gpu

        return on_gpu(
            lengths, moves, sources, num_samples=num_samples, num_sink=num_sink,
            num_resident=num_resident, num_recent=num_recent, num_dense=num_dense,
        )  # fmt: skip
    size, position = len(lengths), lengths.long() - num_recent - 1
    count = (position + 1 - num_sink).clamp(min=0)
    offsets, _ = sample_offsets(count, num_samples)
    is_newest = (offsets == count[:, None] - 1) & (count[:, None] > 0)
    index = torch.arange(num_samples, device=lengths.device)
    moves[:size] = torch.where(is_newest, index, -1).amax(-1)
    sources[:size] = latest_slots(
        position, lengths <= num_dense, num_resident=num_resident, num_recent=num_recent
    )


def begin_samples(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    log_weight: torch.Tensor,
    active: torch.Tensor,
    *,
    scale: float,
    scratch: torch.Tensor | None,
) -> None:
    """Let a GPU attend to samples alone, beside what attends to the other tokens.

    `attend_samples`, which is to be queued behind both, merges the two. On a CPU it does all.

    Parameters
    ----------
    q, k_pool, v_pool, slots, rows, log_weight, active, scale, scratch
        As for `attend_samples`.
    """
    if uses_triton(q.device):
        from tandemkv.kernels.triton_ops.samples import begin_samples as on_gpu

        on_gpu(
            q, k_pool, v_pool, slots, rows, log_weight, active, scale=scale, scratch=scratch
        )  # fmt: skip


def attend_samples(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    log_weight: torch.Tensor,
    active: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    lse_unit: float = 1.0,
    scratch: torch.Tensor | None = None,
    has_begun: bool = False,
) -> None:
    """Attend to weighted samples, and merge that into attention over other tokens, in place.

    With l a sample's scaled logit and w its log weight, it enters the softmax as ``l + w``.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float.
    k_pool, v_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, float.
    slots : torch.Tensor
        ``[num_reqs, num_samples]``, int32 or int64. Slot of each sample in the pools.
    rows : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request in `log_weight`.
    log_weight : torch.Tensor
        ``[num_rows, num_kv_heads, num_samples]``, float32, as `mirror_diff` writes it. A sample of
        ``-inf`` has no influence, whatever is in its slot.
    active : torch.Tensor
        ``[num_reqs]``, bool. What others have in `out` stays as it is.
    out : torch.Tensor
        ``[num_reqs, num_qo_heads, head_dim]``, float, contiguous. Attention over the others, and
        over all afterwards; where `lse` is ``-inf`` it is taken for 0.
    lse : torch.Tensor
        ``[num_reqs, num_qo_heads]``, float32. Log-sum-exp of the scaled logits of the others; not
        written.
    scale : float
        Factor of the logits, usually ``head_dim ** -0.5``.
    lse_unit : float
        What `lse` is to be multiplied with to be a natural logarithm: ``ln 2`` for FlashInfer's.
    scratch : torch.Tensor, optional
        From `make_sample_scratch`. Required on a GPU, not looked at otherwise.
    has_begun : bool
        `begin_samples` has been given the same, and nothing else has used `scratch` since.
    """
    dims = Dims()
    dims.check("q", q, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("k_pool", k_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check("v_pool", v_pool, "num_slots num_kv_heads head_dim", KV_FLOATS)
    dims.check_groups("num_qo_heads", "num_kv_heads")
    dims.check("slots", slots, "num_reqs num_samples", INTS)
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("log_weight", log_weight, "num_rows num_kv_heads num_samples", FLOAT32)
    dims.check("active", active, "num_reqs", BOOL)
    dims.check("out", out, "num_reqs num_qo_heads head_dim", FLOATS)
    dims.check("lse", lse, "num_reqs num_qo_heads", FLOAT32)
    if not out.is_contiguous():
        fail("out.stride()", out.stride(), "contiguous")
    if uses_triton(q.device):
        from tandemkv.kernels.triton_ops.samples import attend_samples as on_gpu

        return on_gpu(
            q, k_pool, v_pool, slots, rows, log_weight, active, out, lse, scale=scale,
            lse_unit=lse_unit, scratch=scratch, has_begun=has_begun,
        )  # fmt: skip
    num_heads = k_pool.shape[1]
    for req in active.nonzero()[:, 0].tolist():
        weight = log_weight[int(rows[req])]
        is_counted = weight > float("-inf")  # [H, S]
        index = slots[req].long()
        k, v = (rows_at(pool, index).float().transpose(0, 1) for pool in (k_pool, v_pool))
        v = v.masked_fill(~is_counted[..., None], 0.0)
        grouped = q[req].float().view(num_heads, -1, q.shape[-1])
        logits = torch.bmm(grouped, k.transpose(1, 2)) * scale + weight[:, None]
        logits = logits.masked_fill(~is_counted[:, None], float("-inf"))
        rest = (lse[req] * lse_unit).view(num_heads, -1, 1)
        joint = torch.cat([rest, logits], dim=-1)
        probs = joint.softmax(-1)
        before = out[req].float().view_as(grouped).masked_fill(rest.isneginf(), 0.0)
        merged = probs[..., :1] * before + torch.bmm(probs[..., 1:], v)
        is_any = is_counted.any(-1)[:, None, None]
        out[req] = torch.where(is_any, merged, before).view_as(out[req]).to(out.dtype)


def sample_offsets(
    num_candidates: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which candidates are samples, and how many of them each stands for.

    Parameters
    ----------
    num_candidates : torch.Tensor
        ``[...]``, int32 or int64.
    num_samples : int
        Even.

    Returns
    -------
    offsets : torch.Tensor
        ``[..., num_samples]``, int64. Place of each sample among the candidates, -1 where there are
        fewer of them.
    spans : torch.Tensor
        Likewise: candidates from a sample to the next; of the newest, to where the next will be,
        which is more than there are.
    """
    count = num_candidates.long().unsqueeze(-1)
    offsets = torch.arange(num_samples, device=count.device).expand(*count.shape[:-1], -1)
    stride, top = 1, torch.ones_like(count)
    while bool((num_samples * stride < count).any()):
        is_reached = num_samples * stride < count
        top = torch.where(is_reached, stride, top)
        later = offsets + (num_samples - 1) * stride
        moves = is_reached & (offsets & stride != 0) & (later < count)
        offsets, stride = torch.where(moves, later, offsets), 2 * stride
    first = num_samples * top
    is_wide = (offsets & top == 0) & ((offsets + first < count) | (offsets >= first))
    spans = torch.where(is_wide & (num_samples < count), 2 * top, top)
    return torch.where(offsets < count, offsets, -1), spans


def sample_weights(
    resident_pos: torch.Tensor, hi: torch.Tensor, num_sink: int, num_samples: int
) -> torch.Tensor:
    """Return the log weights of samples, given what is resident.

    Parameters
    ----------
    resident_pos : torch.Tensor
        ``[num_reqs, num_kv_heads, num_resident]``, int32, -1 where empty.
    hi : torch.Tensor
        ``[num_reqs]``. Candidates are ``[num_sink, hi)``.

    Returns
    -------
    torch.Tensor
        ``[num_reqs, num_kv_heads, num_samples]``, float32: of what is not resident each sample
        that is not either has a share, in proportion to its span; ``-inf`` for the others.
    """
    offsets, spans = sample_offsets((hi.long() - num_sink).clamp(min=0), num_samples)
    positions = torch.where(offsets >= 0, offsets + num_sink, -2)[:, None, :]
    resident = resident_pos.long().sort(dim=-1).values
    wanted = positions.expand(*resident.shape[:2], -1).contiguous()
    place = torch.searchsorted(resident, wanted).clamp_(max=max(0, resident.shape[-1] - 1))
    is_free = wanted >= 0
    if resident.shape[-1]:
        is_free = is_free & (resident.gather(-1, place) != wanted)
    share = torch.where(is_free, spans[:, None, :], 0).float()
    left_out = (hi[:, None].long() - (resident_pos >= 0).sum(-1)).clamp(min=0).float()
    total = share.sum(-1, keepdim=True)
    return torch.where(is_free, (share * (left_out[..., None] / total)).log(), float("-inf"))
