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
    """Takes in texts one by one, all of them by `add` and then again by `weigh`, and chooses.

    The head maps come first: for each pair of layers the map that maximises the heads' similarity
    (minimum over tokens, mean over texts). The similarity of layers is then that of their mean
    distributions under the map, again the minimum over the tokens of a text, averaged over texts.
    No map is known before the last text, and what all of them need of every token is gigabytes:
    so each text is read twice.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._num_texts = 0
        self._importance = torch.zeros(1, dtype=torch.float64)
        self._by_head: dict[tuple[int, int], torch.Tensor] = {}
        self._maps: dict[tuple[int, int], tuple[int, ...]] = {}
        self._worst: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, seen: TextAttention) -> None:
        """Take in one text for the head maps."""
        self._num_texts += 1
        self._importance = self._importance + torch.tensor(seen.importance, dtype=torch.float64)
        sets = [top_sets(layer, self._top_k) for layer in seen.weights]
        for b, reuse in enumerate(seen.weights):
            own = reuse.gather(-1, sets[b]).sum(-1)[:, None].clamp(min=1e-30)
            for a in range(b + 1):
                worst = (recovered_mass(sets[a], reuse) / own).amin(dim=-1).double()
                self._by_head[a, b] = worst + self._by_head.get((a, b), 0.0)

    def weigh(self, seen: TextAttention) -> None:
        """Take in one text for the similarity of layers, once all were added."""
        if not self._maps:
            self._maps = {pair: head_map(total) for pair, total in self._by_head.items()}
        sets = [top_sets(layer, self._top_k) for layer in seen.weights]
        for b, reuse in enumerate(seen.weights):
            own = reuse.gather(-1, sets[b]).sum(-1).sum(0)
            for a in range(b + 1):
                mapped = sets[a][list(self._maps[a, b])]
                worst = (reuse.gather(-1, mapped).sum(-1).sum(0) / own).amin()
                self._worst[a, b] = worst.double() + self._worst.get((a, b), 0.0)

    def result(self, num_anchors: int) -> KascadeCalibration:
        """Choose anchors and head maps."""
        importance = self._importance / self._num_texts
        num_layers, maps = len(importance), self._maps
        similarity = torch.zeros(num_layers, num_layers, dtype=torch.float64)
        for (a, b), total in self._worst.items():
            similarity[a, b] = total / self._num_texts * importance[b]
        anchors = choose_anchors(similarity, min(num_anchors, num_layers))
        sources = [max(a for a in anchors if a <= layer) for layer in range(num_layers)]
        return KascadeCalibration(
            anchors=anchors,
            head_maps=tuple(maps[a, b] for b, a in enumerate(sources)),
            top_k=self._top_k,
            importance=tuple(round(float(w), 6) for w in importance),
            similarity=tuple(tuple(round(float(s), 6) for s in row) for row in similarity),
        )
