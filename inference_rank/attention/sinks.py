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
    """Return attention over tokens and sinks, contiguous, and its log-sum-exp.

    Over the tokens alone they are `out` ``[B, Hq, D]``, float, and `lse` ``[B, Hq]``, float32; the
    results are of their dtypes. `lse` times `lse_unit` is a natural logarithm: ``ln 2`` for
    FlashInfer's. `sinks` ``[Hq]``, float, are the logits of each head, natural and not scaled.
    """
    natural = lse.float() * lse_unit
    joined = torch.logaddexp(natural, sinks.float().expand_as(natural))
    share = torch.sigmoid(natural - sinks.float())[..., None]
    return (out.float() * share).to(out.dtype), joined / lse_unit
