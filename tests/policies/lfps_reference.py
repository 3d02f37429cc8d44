# SPDX-License-Identifier: Apache-2.0
"""LFPS in float64 as its equations are printed: position-indexed tables, whole passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

OFFSETS = (-1, 0, 1, 2)


def kurtosis(x):
    """Eq. 8, without a factor n."""
    centred = x - x.mean()
    return (centred**4).sum() / (centred**2).sum() ** 2


def threshold(x, a):
    """Eq. 8."""
    return a * x.mean() / kurtosis(x)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@dataclass
class Reference:
    """One KV head. `keys` and `values` are ``[positions, D]``, queries ``[G, D]``."""

    keys: np.ndarray
    values: np.ndarray
    lo: int
    num_recent: int
    budget: int
    a: float = 0.2
    decay: float = 0.95
    epsilon: float = 0.85
    num_bypassed: int = 0
    margin: float = np.inf
    """How near a decision of the last step was, as a part of what it was compared with."""
    vertical: np.ndarray = field(init=False)
    slash: np.ndarray = field(init=False)
    sigma2: np.ndarray = field(init=False)

    @property
    def scale(self):
        return self.keys.shape[1] ** -0.5

    def candidates(self, position):
        """Where the candidates of the query at `position` end."""
        return position + 1 - self.num_recent

    def start(self, queries, positions):
        """Eq. 4; `slash` is aligned with the last row, as printed."""
        end = self.candidates(positions[-1])
        self.vertical, self.slash = np.zeros(end), np.zeros(end)
        c = 1.0 / (2.0 * len(queries) * (1.0 - self.decay))
        for j, (query, position) in enumerate(zip(queries[::-1], positions[::-1], strict=True)):
            hi = self.candidates(position)
            weights = softmax(query @ self.keys[self.lo : hi].T * self.scale).mean(0)
            self.vertical[self.lo : hi] += c * weights
            # w of row n - j enters at i with i - j + 1 = its position.
            self.slash[self.lo + j : hi + j] += c * weights
        logits = queries[-1] @ self.keys[self.lo : end].T * self.scale
        self.sigma2 = logits.var(-1) / (queries[-1] ** 2).sum(-1)

    def decide(self, values, limit):
        """Which values are above a limit."""
        self.margin = min(self.margin, np.abs(np.asarray(values) / limit - 1).min())
        return values > limit

    def rho(self, query, position):
        """Eq. 5 and 6, and the logarithm of w_global."""
        n = self.candidates(position) - self.lo
        mean = self.keys[self.lo : self.candidates(position)].mean(0)
        sink = np.exp(query @ self.keys[: self.lo].T * self.scale).sum(-1)
        local = np.exp(query @ self.keys[position - 6 : position].T * self.scale).sum(-1)
        log_global = np.log(n) + query @ mean * self.scale + (query**2).sum(-1) * self.sigma2 / 2
        return sink / (sink + np.exp(log_global) + local), log_global

    def step(self, query, position):
        """One decode step: output ``[G, D]``, log-sum-exp ``[G]``, candidates, chosen."""
        hi, lo = self.candidates(position), self.lo
        # The new candidate starts at zero; the shift of Eq. 10 for this step's distances.
        vertical = np.append(self.vertical, 0.0)
        shifted = np.concatenate([np.zeros(lo), [0.0], self.slash[lo:]])[:hi]
        rho, log_global = self.rho(query, position)
        self.margin = np.inf
        bypassed = self.decide(rho, self.epsilon)
        self.num_bypassed += int(bypassed.sum())
        output = np.repeat(self.values[lo:hi].mean(0)[None], len(query), 0)
        lse = log_global.copy()
        self.vertical, self.slash = vertical, shifted
        if bypassed.all():
            return output, lse, [], []
        v, s = vertical[lo:], shifted[lo:]
        first, above = (
            np.flatnonzero(self.decide(v, of(v)) | self.decide(s, of(s)))
            for of in (lambda x: threshold(x, self.a), np.mean)
        )
        found = sorted(
            {x + d for x in first for d in OFFSETS if 0 <= x + d < len(v)} & set(above.tolist())
        )
        if not found:  # nothing stands out: the rest has no part in this step
            output[~bypassed], lse[~bypassed] = 0.0, -np.inf
            return output, lse, [], []
        rows = np.array(found) + lo
        logits = query @ self.keys[rows].T * self.scale
        pooled = softmax(logits[~bypassed]).mean(0)
        ranked = np.argsort(-pooled, kind="stable")
        if len(ranked) > self.budget:
            self.decide(pooled[ranked[self.budget]], pooled[ranked[self.budget - 1]])
        best = np.sort(ranked[: self.budget])
        logits, rows = logits[:, best], rows[best]
        weights = softmax(logits)
        output[~bypassed] = (weights @ self.values[rows])[~bypassed]
        lse[~bypassed] = np.log(np.exp(logits).sum(-1))[~bypassed]
        change = weights[~bypassed].mean(0) - 0.5 / len(rows)
        self.vertical, self.slash = self.decay * vertical, self.decay * shifted
        self.vertical[rows] += change
        self.slash[rows] += change
        return output, lse, found, rows.tolist()
