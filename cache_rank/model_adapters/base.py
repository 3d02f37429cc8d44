# SPDX-License-Identifier: Apache-2.0
"""Predict the query of a layer from a residual stream that enters an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F

from tandemkv.cache_rank.policies.base import Rotary
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, read_config
from tandemkv.kernels.norm import rms_norm
from tandemkv.kernels.rope import apply_rope

from .checkpoint import Checkpoint
from .rotary import read_rotary

_CPU = torch.device("cpu")


def _on(rotary: Rotary, device: torch.device) -> Rotary:
    return Rotary(rotary.inv_freq.to(device), rotary.scaling)


class ModelAdapter:
    """Holds ``input_layernorm``, ``q_proj`` and, where there is one, ``q_norm`` of the layers.

    Parameters
    ----------
    model_dir : Path
        Model directory with safetensors; only the tensors named above are read.
    model : ModelSpec
        Shape, and the dtype that the weights are kept in.
    layers : Sequence[int]
        The layers to load.
    rotary : Rotary, optional
        On `device`; read from `model_dir` if not given.
    device : torch.device
        Where the weights are kept.
    """

    has_bias: ClassVar[bool | None] = None
    """Whether q_proj has a bias; None: as ``attention_bias`` of the configuration says."""
    has_query_norm: ClassVar[bool] = False

    def __init__(
        self,
        model_dir: Path,
        model: ModelSpec,
        *,
        layers: Sequence[int],
        rotary: Rotary | None = None,
        device: torch.device = _CPU,
    ) -> None:
        config = read_config(model_dir)
        self._model = model
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._rotary = rotary or _on(read_rotary(model_dir), device)
        bias = bool(config.get("attention_bias")) if self.has_bias is None else self.has_bias
        names = ["input_layernorm.weight", "self_attn.q_proj.weight"]
        names += ["self_attn.q_proj.bias"] if bias else []
        names += ["self_attn.q_norm.weight"] if self.has_query_norm else []
        dtype = getattr(torch, model.dtype)
        with Checkpoint(model_dir) as checkpoint:
            self._weights = {
                layer: {
                    name: checkpoint.read(f"model.layers.{layer}.{name}").to(device, dtype)
                    for name in names
                }
                for layer in layers
            }

    def predict_query(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the query that `layer` would have if `hidden` entered it.

        Parameters
        ----------
        layer : int
            One of the loaded layers.
        hidden : torch.Tensor
            ``[S, hidden_size]``, residual stream.
        positions : torch.Tensor
            ``[S]`` int64.

        Returns
        -------
        torch.Tensor
            ``[S, num_qo_heads, head_dim]``, after RoPE.
        """
        weights = self._weights[layer]
        normed = rms_norm(hidden, weights["input_layernorm.weight"], self._eps)
        query = F.linear(
            normed, weights["self_attn.q_proj.weight"], weights.get("self_attn.q_proj.bias")
        )
        query = query.view(len(hidden), self._model.num_qo_heads, self._model.head_dim)
        if self.has_query_norm:
            query = rms_norm(query, weights["self_attn.q_norm.weight"], self._eps)
        return apply_rope(query, positions, self._rotary.inv_freq, scaling=self._rotary.scaling)
