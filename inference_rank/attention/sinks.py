# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a learned logit per query head that takes a share of its softmax.

It enters as a token without a value: the output shrinks, and the log-sum-exp grows. Whatever is
merged afterwards, samples for example, is merged as if the sink had been attended to.
"""

from __future__ import annotations

import torch


def join_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, *, lse_unit: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over tokens and sinks.

    Parameters
    ----------
    out : torch.Tensor
        ``[B, Hq, D]``, float: attention over the tokens alone.
    lse : torch.Tensor
        ``[B, Hq]``, float32: log-sum-exp of their scaled logits.
    sinks : torch.Tensor
        ``[Hq]``, float: the logit of each head, natural and not scaled.
    lse_unit : float
        What `lse` is to be multiplied with to be a natural logarithm: ``ln 2`` for FlashInfer's.

    Returns
    -------
    out : torch.Tensor
        ``[B, Hq, D]``, contiguous, of the dtype of `out`.
    lse : torch.Tensor
        ``[B, Hq]``, float32, in the unit of `lse`.
    """
    natural = lse.float() * lse_unit
    joined = torch.logaddexp(natural, sinks.float().expand_as(natural))
    share = torch.sigmoid(natural - sinks.float())[..., None]
    return (out.float() * share).to(out.dtype), joined / lse_unit
