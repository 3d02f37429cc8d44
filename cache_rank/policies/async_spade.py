# SPDX-License-Identifier: Apache-2.0
"""AsyncSpade: predict the next query by ridge regression, select ahead of time."""

from __future__ import annotations

from typing import ClassVar

import torch

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.query_window import ridge_predict

from .base import PolicyCapabilities
from .windowed import WindowedPolicy


class AsyncSpadePolicy(WindowedPolicy):
    """Score with the assembled ridge prediction of the next query (Eq. 2-5).

    Notes
    -----
    Deviations from the paper, each an option or stated:

    - The sign in the softmax is that of Eq. 3 (``ridge_sign=1``); Algorithm 1 prints the other.
    - ``eps`` is not given there; ``ridge_eps`` is relative to the mean squared norm of the
      queries regressed on.
    - Queries are regressed on without RoPE, and the prediction is rotated to the position of
      its use (``ridge_unrotate``).
    - Tokens are ranked by the mean of the softmax over the group's query heads, not by pooled
      logits (``pooling``).
    - With ``pool_before``, which the paper does not have, a token counts at least as much as
      those before it: what follows the tokens that were predicted is asked for a step later. It
      helps with ``ridge_window`` = 1, where the prediction is the last query; the mean over
      windows of many sizes is too smooth for it (docs/quality.md).
    - What is selected enters a resident set that holds more than one selection (LRU), instead
      of replacing the set.
    - While a request has fewer than W + 1 queries, the sizes that there are get averaged.

    References
    ----------
    *AsyncSpade: Efficient Test-Time Scaling with Asynchronous Sparse Decoding*.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NEXT_STEP, wants_query_window=True, prediction="ridge"
    )

    def predict(self, windows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See `WindowedPolicy.predict`."""
        selection = self.context.selection
        return ridge_predict(
            windows,
            counts,
            eps=selection.ridge_eps,
            sign=selection.ridge_sign,
            normalise=selection.ridge_normalise,
        )
