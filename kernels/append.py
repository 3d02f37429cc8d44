# SPDX-License-Identifier: Apache-2.0
"""Writing the newest token of each request into resident sets."""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import INT64, INTS, KV_FLOATS, Dims
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.step_flags import StepWait


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMoves:
    """Tokens of resident sets that become samples; see `tandemkv.kernels.samples`."""

    k: torch.Tensor
    v: torch.Tensor
    """``[num_rows, num_samples, num_kv_heads, head_dim]``. Written."""
    samples: torch.Tensor
    sources: torch.Tensor
    """``[num_reqs]``, int64. Sample that each request's token becomes, -1 for none, and its
    slot."""

    def check(self, dims: Dims, k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
        """Compare with the other arguments of `append_tokens`, or raise `ValueError`."""
        layout = "num_rows num_samples num_kv_heads head_dim"
        dims.check("moves.k", self.k, layout, (k_dtype,))
        dims.check("moves.v", self.v, layout, (v_dtype,))
        dims.check("moves.samples", self.samples, "num_reqs", INT64)
        dims.check("moves.sources", self.sources, "num_reqs", INT64)


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    *,
    moves: SampleMoves | None = None,
    awaited: StepWait | None = None,
) -> None:
    """Write one token per request, keys and values, bit by bit.

    A token that becomes a sample is copied before, maybe from where the new one is written.

    Parameters
    ----------
    k, v : torch.Tensor
        ``[num_reqs, num_kv_heads, head_dim]``, float or float8_e4m3fn.
    rows, slots : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request, and slot of its token. Of
        requests with equal row and slot (padding) any one wins.
    k_res, v_res : torch.Tensor
        ``[num_rows, num_slots, num_kv_heads, head_dim]``, dtype of `k` and `v`. Written.
    moves : SampleMoves, optional
        Which tokens of the resident sets become samples.
    awaited : StepWait, optional
        As `tandemkv.kernels.step_flags.wait_flags`, after the writes and in the same launch: what
        is queued next is held back until all of its flags are up.
    """
    dims = Dims()
    res, token = "num_rows num_slots num_kv_heads head_dim", "num_reqs num_kv_heads head_dim"
    dims.check("k", k, token, KV_FLOATS)
    dims.check("v", v, token, KV_FLOATS)
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("slots", slots, "num_reqs", INTS)
    dims.check("k_res", k_res, res, (k.dtype,))
    dims.check("v_res", v_res, res, (v.dtype,))
    if moves is not None:
        moves.check(dims, k.dtype, v.dtype)
    if awaited is not None:
        awaited.check()
    if uses_triton(k.device):
        from tandemkv.kernels.triton_ops.append import append_tokens as on_gpu

        return on_gpu(k, v, rows, slots, k_res, v_res, moves=moves, awaited=awaited)
    if moves is not None:
        chosen = (moves.samples >= 0).nonzero()[:, 0]
        own, index, source = rows[chosen].long(), moves.samples[chosen], moves.sources[chosen]
        moves.k[own, index], moves.v[own, index] = k_res[own, source], v_res[own, source]
    k_res[rows.long(), slots.long()] = k
    v_res[rows.long(), slots.long()] = v
    if awaited is not None:
        awaited.now()
