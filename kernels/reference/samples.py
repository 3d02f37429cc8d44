# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.samples`."""

import torch

from tandemkv.kernels.reference.paging import rows_at
from tandemkv.kernels.slot_rules import latest_slots


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
        Likewise: candidates from a sample to the next.
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


def load_sample_slots(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_sink: int,
    num_recent: int,
) -> None:
    """Fill; see `tandemkv.kernels.samples.load_sample_slots`."""
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
    """Fill; see `tandemkv.kernels.samples.load_sample_moves`."""
    size, position = len(lengths), lengths.long() - num_recent - 1
    count = (position + 1 - num_sink).clamp(min=0)
    offsets, _ = sample_offsets(count, num_samples)
    is_newest = (offsets == count[:, None] - 1) & (count[:, None] > 0)
    index = torch.arange(num_samples, device=lengths.device)
    moves[:size] = torch.where(is_newest, index, -1).amax(-1)
    sources[:size] = latest_slots(
        position, lengths <= num_dense, num_resident=num_resident, num_recent=num_recent
    )


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
    lse_unit: float,
    scratch: object = None,
) -> None:
    """Attend and merge; see `tandemkv.kernels.samples.attend_samples`."""
    del scratch
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
