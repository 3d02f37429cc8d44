# SPDX-License-Identifier: Apache-2.0
"""Which calibration a rank uses: the one given, or the shipped one of the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tandemkv.cache_rank.policies.base import HeadClusters, LayerShare, PolicyCapabilities
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .format import Calibration, CalibrationError, parse_calibration, read_calibration

logger = logging.getLogger(__name__)

_DATA = "tandemkv.cache_rank.calibration"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a policy is built with; `origin` names where it comes from, empty if nowhere."""

    share: LayerShare | None = None
    clusters: HeadClusters | None = None
    origin: str = ""


def resolve_calibration(
    selection: SelectionSettings, model: ModelSpec, capabilities: PolicyCapabilities
) -> Resolved:
    """Find what the policy of `selection` needs to know of `model`.

    A policy that declares ``kascade``, and any with ``share_layers``, gets anchors from ``anchors``
    (with identity head maps), else from the file ``calibration``, else from the shipped one; one
    that declares ``sync_kv`` clusters likewise, and cannot share. Others get nothing. Raises
    `CalibrationError` if there is none, it is of another model, or the anchors do not fit the exact
    layers.
    """
    if capabilities.calibration == "sync_kv":
        if selection.share_layers:
            raise CalibrationError(
                f"policy={selection.policy} shares selections over heads, not over layers; drop "
                "--share-layers"
            )
        found, origin = _find("sync_kv", selection, model)
        assert found.sync_kv is not None
        clusters = HeadClusters(found.sync_kv.clusters, found.sync_kv.representatives)
        return Resolved(clusters=clusters, origin=origin)
    if capabilities.calibration != "kascade" and not selection.share_layers:
        return Resolved()
    if selection.anchors:
        if selection.anchors[-1] >= model.num_layers:
            raise CalibrationError(
                f"anchors={selection.anchors}: the model has layers 0 to {model.num_layers - 1}"
            )
        identity = tuple(range(model.num_kv_heads))
        share = share_of(selection.anchors, (identity,) * model.num_layers)
        origin = "the setting anchors"
    else:
        found, origin = _find("kascade", selection, model)
        assert found.kascade is not None
        share = share_of(found.kascade.anchors, found.kascade.head_maps)
    _check_full_anchors(share, model)
    if capabilities.timing is not Timing.SAME_STEP_QUERY:
        _check_exact_anchors(share, selection)
    return Resolved(share=share, origin=origin)


def share_of(anchors: tuple[int, ...], head_maps: tuple[tuple[int, ...], ...]) -> LayerShare:
    """Return who follows whom: each layer the last anchor at or before it, else itself."""
    sources = tuple(
        max((anchor for anchor in anchors if anchor <= layer), default=layer)
        for layer in range(len(head_maps))
    )
    return LayerShare(sources, head_maps)


def shipped(policy: str, model: ModelSpec) -> tuple[Calibration, str] | None:
    """Return the calibration in this package that fits `model`, and its name.

    The one with its hash, else one of the same architecture and shape: fine-tuned variants share
    what is measured here well enough to start from.
    """
    fitting = []
    for item in sorted((files(_DATA) / "data").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".json"):
            found = parse_calibration(item.read_text(encoding="utf-8"), item.name)
            if found.policy == policy and found.model.has_shape_of(model):
                fitting.append((found, item.name))
    by_hash = [pair for pair in fitting if pair[0].model.model_hash == model.model_hash]
    return next(iter([*by_hash, *fitting]), None)


def _find(policy: str, selection: SelectionSettings, model: ModelSpec) -> tuple[Calibration, str]:
    if selection.calibration is not None:
        path = Path(selection.calibration).expanduser()
        found = read_calibration(path)
        check_model(found, model, policy, str(path))
        return found, str(path)
    known = shipped(policy, model)
    if known is None:
        raise CalibrationError(
            f"policy={selection.policy}: no calibration is shipped for this model "
            f"({model.architecture}, {model.num_layers} layers, {model.num_kv_heads} KV heads); "
            f"make one with `tandemkv calibrate MODEL --policy {policy} --out FILE` and give it as "
            "--calibration FILE" + (", or name layers as --anchors" if policy == "kascade" else "")
        )
    calibration, name = known
    logger.info("calibration %s (%s, %s)", name, calibration.source, calibration.model.model_id)
    return calibration, f"shipped {name}"


def check_model(found: Calibration, model: ModelSpec, policy: str, name: str) -> None:
    """Refuse a file of another policy or model.

    Raises `CalibrationError`, naming what differs.
    """
    if found.policy != policy:
        raise CalibrationError(f"calibration={name} is for policy {found.policy}, not {policy}")
    again = f"run `tandemkv calibrate MODEL --policy {policy} --out FILE` for this model"
    if not found.model.has_shape_of(model):
        raise CalibrationError(
            f"calibration={name} is of {found.model.model_id} ({found.model.num_layers} layers, "
            f"{found.model.num_kv_heads} KV heads, hidden size {found.model.hidden_size}), "
            f"the model served has {model.num_layers}, {model.num_kv_heads}, {model.hidden_size}; "
            f"{again}"
        )
    if found.model.model_hash is not None and found.model.model_hash != model.model_hash:
        raise CalibrationError(
            f"calibration={name} was made with other weights of the same shape "
            f"({found.model.model_id}, hash {found.model.model_hash}, here {model.model_hash}); "
            f"{again}"
        )


def _check_full_anchors(share: LayerShare, model: ModelSpec) -> None:
    others = set(model.other_layers)
    for layer, source in enumerate(share.sources):
        if source in others and layer not in others:
            full = ",".join(str(x) for x in range(model.num_layers) if x not in others)
            is_linear = source in model.linear_layers
            raise CalibrationError(
                f"layer {layer} follows anchor {source}, which "
                f"{'is linear attention' if is_linear else 'attends to a sliding window'} and "
                f"selects nothing; use --anchors with some of {full}"
            )


def _check_exact_anchors(share: LayerShare, selection: SelectionSettings) -> None:
    exact = set(selection.exact_layer_ids)
    followers = [layer for layer, source in enumerate(share.sources) if source in exact]
    wrong = [layer for layer in followers if layer not in exact]
    if wrong:
        anchor = share.sources[wrong[0]]
        needed = ",".join(str(layer) for layer in sorted(exact.union(followers)))
        is_open = selection.exact_layers is None
        raise CalibrationError(
            f"share_layers: layer {wrong[0]} follows anchor {anchor}, which is an exact layer"
            f"{' by default' if is_open else ''} and selects nothing with "
            f"policy={selection.policy}; use --exact-layers {needed}, or anchors that leave it out"
        )
