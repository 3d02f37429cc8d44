# SPDX-License-Identifier: Apache-2.0
"""Kascade's anchors and head maps, from the attention of some texts (sections 3.2-3.5)."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.calibration.format import KascadeCalibration

from .attention import TextAttention


def top_sets(weights: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return each head's `top_k` keys ``[H, T, k]`` int64; all of them if there are fewer."""
    return weights.topk(min(top_k, weights.shape[-1]), dim=-1).indices


def recovered_mass(sets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mass of each head on the sets of each head of another layer, for every token.

    With the sets of layer a and the weights of layer b it is the numerator of Eq. 3; its
    denominator is the diagonal of the same with both of layer b.

    `sets` are ``[H, T, k]`` int64, `weights` ``[H, T, n]``, distributions over n keys. Returned is
    ``[H, H, T]``: head j of `weights` on the set of head i, at ``[j, i]``.
    """
    heads, length, top_k = sets.shape
    by_token = sets.transpose(0, 1).reshape(length, heads * top_k)
    rows = [head.gather(-1, by_token).view(length, heads, top_k).sum(-1).t() for head in weights]
    return torch.stack(rows)


def head_map(similarity: torch.Tensor) -> tuple[int, ...]:
    """Return the most similar head of the anchor for each head of the reuse layer.

    `similarity` is ``[H, H]``, head of b by head of a; many may map to one.
    """
    return tuple(int(head) for head in similarity.argmax(dim=-1))


def choose_anchors(similarity: torch.Tensor, num_anchors: int) -> tuple[int, ...]:
    """Choose the anchors that maximise the similarity to the layers after them (Algorithm 1).

    `similarity` is ``[L, L]``, weighted by importance; ``[a, b]`` counts for ``b >= a``. There are
    `num_anchors`, at most L; they ascend from layer 0.
    """
    num_layers = len(similarity)
    # served[i, j]: what layers i to j - 1 get from anchor i.
    served = torch.zeros(num_layers + 1, num_layers + 1, dtype=torch.float64)
    for i in range(num_layers):
        served[i, i + 1 :] = similarity[i, i:].double().cumsum(0)
    best = torch.full((num_anchors + 1, num_layers + 1), float("-inf"), dtype=torch.float64)
    came_from = torch.zeros(num_anchors + 1, num_layers + 1, dtype=torch.int64)
    best[0, 0] = 0.0
    for m in range(1, num_anchors + 1):
        for j in range(m, num_layers + 1):
            totals = best[m - 1, :j] + served[:j, j]
            best[m, j], came_from[m, j] = totals.max(dim=0)
    anchors, end = [], num_layers
    for m in range(num_anchors, 0, -1):
        end = int(came_from[m, end])
        anchors.append(end)
    return tuple(reversed(anchors))


class KascadeMeasurement:
    """Collects texts one by one, then chooses.

    The head maps come first: for each pair of layers the map that maximises the heads' similarity
    (minimum over tokens, mean over texts). The similarity of layers is then that of their mean
    distributions under the map, again the minimum over the tokens of a text, averaged over texts.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._pairs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._own: dict[int, list[torch.Tensor]] = {}
        self._importance: list[torch.Tensor] = []

    def add(self, seen: TextAttention) -> None:
        """Take in one text."""
        self._importance.append(torch.tensor(seen.importance, dtype=torch.float64))
        sets = [top_sets(layer, self._top_k) for layer in seen.weights]
        for b, reuse in enumerate(seen.weights):
            for a in range(b + 1):
                self._pairs.setdefault((a, b), []).append(recovered_mass(sets[a], reuse))
            self._own.setdefault(b, []).append(reuse.gather(-1, sets[b]).sum(-1))

    def result(self, num_anchors: int) -> KascadeCalibration:
        """Choose anchors and head maps."""
        num_layers = len(self._own)
        importance = torch.stack(self._importance).mean(dim=0)
        similarity = torch.zeros(num_layers, num_layers, dtype=torch.float64)
        maps: dict[tuple[int, int], tuple[int, ...]] = {}
        for (a, b), numerators in self._pairs.items():
            owns = self._own[b]
            by_head = [
                (n / own[:, None].clamp(min=1e-30)).amin(dim=-1)
                for n, own in zip(numerators, owns, strict=True)
            ]
            chosen = maps[a, b] = head_map(torch.stack(by_head).mean(dim=0))
            heads = torch.arange(len(chosen))
            worst = [
                (n[heads, list(chosen)].sum(0) / own.sum(0)).amin()
                for n, own in zip(numerators, owns, strict=True)
            ]
            similarity[a, b] = torch.stack(worst).double().mean() * importance[b]
        anchors = choose_anchors(similarity, min(num_anchors, num_layers))
        sources = [max(a for a in anchors if a <= layer) for layer in range(num_layers)]
        return KascadeCalibration(
            anchors=anchors,
            head_maps=tuple(maps[a, b] for b, a in enumerate(sources)),
            top_k=self._top_k,
            importance=tuple(round(float(w), 6) for w in importance),
            similarity=tuple(tuple(round(float(s), 6) for s in row) for row in similarity),
        )
