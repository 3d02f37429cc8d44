# SPDX-License-Identifier: Apache-2.0
"""SFI: slow steps at sentence boundaries refresh the selection, fast steps reuse it."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from tandemkv.cache_rank.protocol.messages import RefreshRule, Timing
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.topk import topk_positions

from .base import (
    Policy,
    PolicyCapabilities,
    PolicyError,
    PolicyOptions,
    SeedInput,
    Selection,
    SelectionInput,
    StoredKV,
    check_seed_queries,
)

_EPS = 1e-8
_LEAST = 1e-3
"""Of what is divided by: below it float32 has too few digits left to tell tokens apart."""


class SFIOptions(PolicyOptions):
    """When a step is slow, and the Selector's parameters by their names in the paper."""

    max_interval: int = Field(
        default=64, ge=1, le=65536, description="T_max: steps without a slow one, at most."
    )
    triggers: str = Field(
        default=".?!;\n",
        max_length=256,
        description="A token that ends in one of these characters makes a slow step.",
    )
    window: int = Field(default=16, ge=1, le=1024, description="W: prompt queries as evidence.")
    alpha: float = Field(
        default=0.5, ge=_LEAST, le=1.0, description="Exponent of the power mean, Eq. 7."
    )
    norm_exponent: float = Field(
        default=1.0, ge=0.0, le=16.0, description="gamma of the key-norm prior, Eq. 9."
    )
    decay: float = Field(
        default=1.0, ge=0.0, le=64.0, description="beta of the position prior, Eq. 11."
    )
    decay_power: float = Field(
        default=2.0, ge=1.0, le=16.0, description="p of the position prior, Eq. 11."
    )
    tail_brake: float = Field(
        default=1.0, ge=0.0, le=16.0, description="eta of the position prior, Eq. 11."
    )
    lambda_clip: float = Field(
        default=0.02, ge=0.0, le=1.0, description="Largest weight of the prior, Eq. 18."
    )
    nms: float = Field(default=0.5, ge=0.0, le=16.0, description="alpha_soft of Soft-NMS, Eq. 21.")
    nms_radius: int = Field(
        default=1, ge=0, le=64, description="Neighbours on each side in Soft-NMS, Eq. 20."
    )
    cross: float = Field(
        default=0.35, ge=0.0, le=16.0, description="alpha_cross between heads, Eq. 23."
    )
    temperature: float = Field(
        default=1.0, ge=_LEAST, le=64.0, description="T of the competition of heads, Eq. 22."
    )

    def declare(self, capabilities: PolicyCapabilities) -> DeclaredPolicy:
        """See `PolicyOptions.declare`: the inference rank decides which steps are slow."""
        return capabilities.declare(
            refresh_interval=self.max_interval, refresh_triggers=self.triggers
        )


class SFIPolicy(Policy):
    """Select in slow steps, with their true query, by SFI's closed-form Selector (Algorithm 2).

    A slow step is an exact step in every layer: the request attends to everything, where its K/V
    are, and its true query makes the selection that the steps after it use. A fast step exchanges
    nothing but the new K/V. A step is slow when the token that it takes in ends a sentence (Eq. 5),
    ``max_interval`` (T_max, 64) steps after the last slow one, and when it is the first sparse step
    of a request. The inference rank decides, for it knows the tokens. It reads them from the device
    before the pass: with SGLang's overlap scheduler (off on CPU) that waits for them, and stays
    exact.

    Notes
    -----
    Defaults of the paper: lambda_clip 0.02, alpha_soft 0.5, alpha_cross 0.35, epsilon 1e-8,
    T_max 64, W = 16 at the prefill tail and 1 in decode; there sink 4, recent 256, K 2048.
    The paper gives none for these; chosen here for moderate effect, which ``lambda_clip``
    bounds: alpha 0.5, gamma 1, beta 1, p 2, eta 1, T 1, neighbourhood j - 1 to j + 1.

    Deviations from the paper, each an option or stated:

    - The evidence is a second scan of the keys with the query of the exact step: the same
      numbers as that step's logits, which its kernel does not hand out.
    - Query heads of a group are pooled after the softmax (mean); the paper writes one
      distribution per KV head. Another ``pooling`` is refused, it would give no distribution.
    - Evidence is taken at the prefill tail and in slow steps; a slow step is always W = 1.
    - Norms of keys are computed from the keys, not cached.
    - Cross-head exclusivity is over the KV heads of a tensor-parallel rank: of the whole layer
      without ``--tp``. Several cache ranks with a part of them each are refused.
    - J ends where the recent window of the step that uses the selection begins.
    - What is selected enters a resident set that holds ``resident_factor`` selections (LRU): 1,
      the paper's, by default. With more, tokens of earlier selections are attended to as well.
    - Layers 0 and 1 are dense by default (``exact_layers``).
    - With ``pool_before``, which the paper does not have, log-scores are pooled over
      positions last of all, after Soft-NMS has told neighbours apart.
    - Selections are shipped whole (``fetch_cap`` = K), after the slow step, for the next one.

    References
    ----------
    *Slow-Fast Inference: Training-Free Inference Acceleration via Within-Sentence Support
    Stability*, Algorithms 1 and 2.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.EXACT_STEP, refresh=RefreshRule.BOUNDARY
    )
    options_model: ClassVar[type[PolicyOptions]] = SFIOptions
    options: SFIOptions
    pools_positions: ClassVar[bool] = True

    @classmethod
    def check_settings(cls, selection: SelectionSettings) -> None:
        """See `Policy.check_settings`."""
        options = cls.options_model.model_validate(selection.options)
        assert isinstance(options, SFIOptions)
        check_seed_queries("sfi.window", options.window, selection)
        if selection.pooling != "softmax_mean":
            raise PolicyError(
                f"pooling={selection.pooling}: policy=sfi needs distributions as evidence; "
                "use --pooling softmax_mean"
            )

    def select(self, request: SelectionInput) -> Selection:
        """See `Policy.select`: W = 1, the evidence is the distribution itself."""
        scores = request.score(request.query)  # [S, H, width]
        z = self.log_scores(scores.unsqueeze(0), _norms(request.stored, scores.shape[-1]))
        return Selection(topk_positions(self.pooled(z), request.budget))

    def seed_scores(self, request: SeedInput) -> torch.Tensor:
        """See `Policy.seed_scores`: the last ``window`` prompt queries are the evidence."""
        window = min(self.options.window, len(request.queries))
        rows = [
            request.score(request.queries[i : i + 1], request.positions[i : i + 1])
            for i in range(len(request.queries) - window, len(request.queries))
        ]
        norms = _norms(request.stored, request.hi)[0]
        return self.pooled(self.log_scores(torch.stack(rows), norms))

    def log_scores(self, probs: torch.Tensor, key_norms: torch.Tensor) -> torch.Tensor:
        """Run the Selector up to its top-k.

        Parameters
        ----------
        probs : torch.Tensor
            ``[W, ..., H, n]``: distributions over J, ``-inf`` outside.
        key_norms : torch.Tensor
            ``[..., H, n]``.

        Returns
        -------
        torch.Tensor
            ``[..., H, n]``: log-scores (Eq. 23), ``-inf`` outside J.
        """
        if not probs.shape[-1]:
            return probs[0]  # no request has a candidate
        options = self.options
        allowed = ~probs[0].isneginf()
        evidence = power_mean_evidence(probs.masked_fill(~allowed, 0.0), allowed, options.alpha)
        score = fuse(evidence, prior(key_norms, allowed, options), options.lambda_clip)
        z = torch.log(score + _EPS).masked_fill(~allowed, -torch.inf)  # Eq. 19
        return exclude_across_heads(soft_nms(z, options), options)


def _norms(stored: StoredKV, width: int) -> torch.Tensor:
    """Return the norms ``[S, H, width]`` float32 of the keys at each position."""
    if not width:
        return stored.k.new_zeros((len(stored.slots), stored.k.shape[1], 0), dtype=torch.float32)
    rows = [
        torch.linalg.vector_norm(stored.k.index_select(0, slots[:width]).float(), dim=-1).t()
        for slots in stored.slots
    ]
    return torch.stack(rows)


# The Selector: pure functions of tensors whose last dimension is the context; `allowed` marks the
# set J. What is outside J is 0 in a distribution and ``-inf`` in a log-score. Any float dtype.
# Equation numbers are of the paper's sections 3.2 and 3.3.


def power_mean_evidence(probs: torch.Tensor, allowed: torch.Tensor, alpha: float) -> torch.Tensor:
    """Summarise a window of attention distributions (Eq. 7 and 8).

    Parameters
    ----------
    probs : torch.Tensor
        ``[W, ..., n]``: each row a distribution over J (Eq. 6), 0 outside.
    allowed : torch.Tensor
        ``[..., n]`` bool.
    alpha : float
        In (0, 1]; float32 has digits enough from about 1e-3 on.

    Returns
    -------
    torch.Tensor
        ``[..., n]``: a distribution over J; `probs` itself for W = 1; 0 where J is empty.
        Computed in the log domain: the power of a mean below 1 may underflow.
    """
    if len(probs) == 1:
        return probs[0]
    log_mean = torch.logsumexp(alpha * probs.log(), dim=0) / alpha  # up to a factor
    weights = torch.softmax(log_mean.masked_fill(~allowed, -torch.inf), dim=-1)
    return weights.masked_fill(~allowed, 0.0)  # also where J is empty, a softmax of nothing


def prior(key_norms: torch.Tensor, allowed: torch.Tensor, options: SFIOptions) -> torch.Tensor:
    """Return the cache-aware prior r (Eq. 9-12), ``[..., n]``, a distribution over J.

    `key_norms` are ``[..., n]``. Computed in the log domain: the product of the factors may
    underflow.
    """
    position = torch.arange(allowed.shape[-1], device=allowed.device).to(key_norms.dtype)
    position = position.expand(allowed.shape)
    first = position.masked_fill(~allowed, torch.inf).amin(dim=-1, keepdim=True)
    last = position.masked_fill(~allowed, -torch.inf).amax(dim=-1, keepdim=True)
    u = ((position - first) / (last - first + _EPS)).clamp(0.0, 1.0).masked_fill(~allowed, 0.0)
    log_prior = -options.norm_exponent * torch.log(key_norms + _EPS)  # Eq. 9
    log_prior = log_prior - options.decay * u.pow(options.decay_power)
    log_prior = log_prior + options.tail_brake * torch.log(1.0 - u + _EPS)
    weights = torch.softmax(log_prior.masked_fill(~allowed, -torch.inf), dim=-1)
    return weights.masked_fill(~allowed, 0.0)  # also where J is empty, a softmax of nothing


def fuse(evidence: torch.Tensor, prior_: torch.Tensor, lambda_clip: float) -> torch.Tensor:
    """Return ``s = (1 - lambda) f + lambda r`` with the closed-form lambda (Eq. 15, 18)."""
    ff = evidence.square().sum(dim=-1, keepdim=True)
    fr = (evidence * prior_).sum(dim=-1, keepdim=True)
    rr = prior_.square().sum(dim=-1, keepdim=True)
    spread = ff - 2 * fr + rr  # |f - r|^2: 0 when they are equal, and any lambda will do
    best = (ff - fr) / torch.where(spread > 0, spread, torch.ones_like(spread))
    weight = best.clamp(0.0, lambda_clip)
    return (1 - weight) * evidence + weight * prior_


def soft_nms(z: torch.Tensor, options: SFIOptions) -> torch.Tensor:
    """Push down what is below its neighbourhood's maximum (Eq. 20, 21).

    `z` is ``[..., n]``, ``-inf`` outside J; the neighbourhood of j has ``nms_radius`` on each side.
    """
    radius = options.nms_radius
    flat = z.reshape(1, -1, z.shape[-1])
    peak = F.max_pool1d(flat, 2 * radius + 1, stride=1, padding=radius).view_as(z)
    gap = torch.where(z.isneginf(), torch.zeros_like(z), peak - z)
    return z - options.nms * gap.clamp(min=0.0)


def exclude_across_heads(z: torch.Tensor, options: SFIOptions) -> torch.Tensor:
    """Let heads compete for each position (Eq. 22, 23). `z` is ``[..., H, n]``."""
    shares = torch.softmax(z / options.temperature, dim=-2)
    adjusted = z + options.cross * torch.log(shares.clamp(min=_EPS))
    return torch.where(z.isneginf(), z, adjusted)
