# SPDX-License-Identifier: Apache-2.0
"""AsyncSpade: predict the next query by ridge regression, select ahead of time."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.query_window import MAX_RIDGE_WINDOW, ridge_predict

from .base import PolicyCapabilities, PolicyOptions
from .windowed import WindowedPolicy, WindowOptions


class AsyncSpadeOptions(WindowOptions):
    """The window, and the regression over it."""

    window: int = Field(
        default=16,
        ge=1,
        le=MAX_RIDGE_WINDOW,
        description="W: queries besides the latest one that are regressed on.",
    )
    eps: float = Field(
        default=1e-2,
        ge=0.0,
        description="Ridge regulariser, relative to the queries' mean squared norm.",
    )
    sign: Literal[1, -1] = Field(default=1, description="Sign in the softmax of Eq. 3.")
    normalise: Literal["softmax", "none"] = Field(
        default="softmax", description="Normalisation of the regression weights."
    )


class AsyncSpadePolicy(WindowedPolicy):
    """Score with the assembled ridge prediction of the next query (Eq. 2-5).

    Notes
    -----
    Deviations from the paper, each an option or stated:

    - The sign in the softmax is that of Eq. 3 (``sign=1``); Algorithm 1 prints the other.
    - The weights of each window size are solved for by themselves, as section 4 says. Algorithm 1
      solves once, for the whole window, and takes the first of these weights for smaller sizes.
    - Algorithm 1 masks these weights with zeros and takes a second softmax over them, in which a
      masked one counts as exp(0). Here there is one softmax, over the weights of the size alone.
    - Eq. 2 has the softmax within what is minimised. Here, as in Algorithm 1, an ordinary ridge
      regression is solved, and its weights go through the softmax.
    - The regulariser is not given there; ``eps`` here is relative to the mean squared norm of the
      queries regressed on.
    - Queries are regressed on without RoPE, and the prediction is rotated to the position of
      its use (``unrotate``).
    - Tokens are ranked by the mean of the softmax over the group's query heads, not by pooled
      logits (``pooling``).
    - With ``pool_before``, which the paper does not have, a token counts at least as much as
      those before it: what follows the tokens that were predicted is asked for a step later. It
      helps with ``window`` = 1, where the prediction is the last query; the mean over
      windows of many sizes is too smooth for it (docs/ablations.md).
    - What is selected enters a resident set, of which one selection replaces at most the fetch cap,
      least recently used tokens first, instead of the whole set. With ``resident_factor`` above 1
      the set holds more than one selection.
    - While a request has fewer than W + 1 queries, the sizes that there are get averaged.
    - In the first step behind a prompt the set has what its last queries attend to; a prediction
      is used from the step after. Layers 0 and 1 are dense by default (``exact_layers``).

    References
    ----------
    *AsyncSpade: Efficient Test-Time Scaling with Asynchronous Sparse Decoding*.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NEXT_STEP, wants_query_window=True, prediction="ridge", per_head=True
    )
    options_model: ClassVar[type[PolicyOptions]] = AsyncSpadeOptions
    options: AsyncSpadeOptions

    @property
    def ridge(self) -> dict[str, Any]:
        """See `WindowedPolicy.ridge`."""
        return self.options.model_dump(include={"eps", "sign", "normalise"})

    def predict(self, windows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See `WindowedPolicy.predict`."""
        return ridge_predict(windows, counts, **self.ridge)
