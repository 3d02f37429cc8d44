# SPDX-License-Identifier: Apache-2.0
"""SyncKV's head clusters, from the attention of some texts (section 4.1, appendix B.1)."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.calibration.format import CalibrationError, SyncKVCalibration

from .attention import TextAttention


def head_overlap(weights: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the mean overlap coefficient of the heads' top-k sets (Eq. 2), ``[H, H]`` float64.

    `weights` are ``[H, T, T]``, one map per KV head. Tokens that see fewer than twice `top_k` keys
    do not count: their sets overlap by necessity.
    """
    weights = weights[:, 2 * top_k - 1 :]
    index = weights.topk(top_k, dim=-1).indices  # [H, t, k]
    chosen = torch.zeros_like(weights, dtype=torch.float32).scatter_(-1, index, 1.0)
    common = torch.einsum("itn,jtn->ijt", chosen, chosen)
    return (common / top_k).double().mean(dim=-1)


def cluster_heads(
    similarity: torch.Tensor, num_clusters: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cluster the heads of a layer by K-Means on the rows of ``max(S) - S``.

    `similarity` is S, ``[H, H]``; `num_clusters` N_r, at most H. Returns the cluster of each head,
    numbered by first appearance, and the head closest to each centroid. Raises `CalibrationError`
    if scikit-learn is not installed.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise CalibrationError(
            "K-Means needs scikit-learn: pip install 'tandemkv[calibration]'"
        ) from error
    distance = (similarity.max() - similarity).double().cpu()
    found = KMeans(n_clusters=num_clusters, n_init=10, random_state=0).fit(distance.numpy())
    labels = found.labels_.tolist()
    order = list(dict.fromkeys(labels))
    representatives = []
    for label in order:
        centre = torch.from_numpy(found.cluster_centers_[label])
        members = [head for head, other in enumerate(labels) if other == label]
        away = (distance[members] - centre).norm(dim=1)
        representatives.append(members[int(away.argmin())])
    return tuple(order.index(label) for label in labels), tuple(representatives)


class SyncKVMeasurement:
    """Collects texts one by one, then clusters."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._overlaps: list[torch.Tensor] = []

    def add(self, seen: TextAttention) -> None:
        """Take in one text."""
        overlaps = [head_overlap(layer, self._top_k) for layer in seen.weights]
        self._overlaps.append(torch.stack(overlaps))

    def result(self, num_clusters: int) -> SyncKVCalibration:
        """Cluster the heads of each layer."""
        similarity = torch.stack(self._overlaps).mean(dim=0)  # [L, H, H]
        num_clusters = min(num_clusters, similarity.shape[1])
        layers = [cluster_heads(layer, num_clusters) for layer in similarity]
        return SyncKVCalibration(
            clusters=tuple(clusters for clusters, _ in layers),
            representatives=tuple(leaders for _, leaders in layers),
            top_k=self._top_k,
        )
