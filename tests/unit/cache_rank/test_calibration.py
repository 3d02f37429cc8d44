# SPDX-License-Identifier: Apache-2.0
"""Calibration files: what is refused and how it is said; which file a model gets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandemkv.cache_rank.calibration.format import (
    CalibratedModel,
    Calibration,
    CalibrationError,
    KascadeCalibration,
    SyncKVCalibration,
    read_calibration,
    write_calibration,
)
from tandemkv.cache_rank.calibration.resolve import resolve_calibration
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=3,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    max_context=128,
    dtype="float32",
    model_hash="aa",
)
SMOLLM2 = msgspec.structs.replace(
    MODEL, num_layers=30, num_qo_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576
)
QWEN3_8B = msgspec.structs.replace(
    MODEL,
    architecture="Qwen3ForCausalLM",
    num_layers=36,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
)
LLAMA31_8B = msgspec.structs.replace(QWEN3_8B, architecture="LlamaForCausalLM", num_layers=32)
QUERY, HIDDEN = Timing.SAME_STEP_QUERY, Timing.SAME_STEP_HIDDEN


def kascade_file() -> Calibration:
    return Calibration(
        version=1,
        policy="kascade",
        source="measured",
        model=CalibratedModel.of(MODEL, "tiny"),
        kascade=KascadeCalibration(anchors=(0, 2), head_maps=((0, 1), (1, 1), (0, 1))),
    )


def sync_file() -> Calibration:
    return Calibration(
        version=1,
        policy="sync_kv",
        source="measured",
        model=CalibratedModel.of(MODEL, "tiny"),
        sync_kv=SyncKVCalibration(
            clusters=((0, 1), (0, 0), (0, 1)), representatives=((0, 1), (1,), (0, 1))
        ),
    )


def resolve(path: Path | None, model: ModelSpec = MODEL, timing: Timing = QUERY, **changes: Any):
    values = {"policy": "kascade", "calibration": str(path) if path else None} | changes
    capabilities = replace(find_policy(values["policy"]).capabilities, timing=timing)
    return resolve_calibration(SelectionSettings(**values), model, capabilities)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for made in (kascade_file(), sync_file()):
        path = tmp_path / f"{made.policy}.json"
        write_calibration(made, path)
        assert read_calibration(path) == made
        assert list(tmp_path.glob(".*")) == [], "nothing half-written is left"


def test_kascade_gets_its_share_and_sync_kv_its_clusters(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_calibration(kascade_file(), path)
    found = resolve(path)
    assert found.share is not None
    assert found.share.sources == (0, 0, 2)
    assert found.share.head_maps == ((0, 1), (1, 1), (0, 1))
    assert found.origin == str(path)
    write_calibration(sync_file(), path)
    clusters = resolve(path, policy="sync_kv").clusters
    assert clusters is not None
    assert clusters.representatives == ((0, 1), (1,), (0, 1))
    assert resolve(None, policy="look_ahead").share is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version=2 is not 1"),
        ({"format": "other"}, "format"),
        ({"surprise": 1}, "surprise"),
        ({"kascade": {"anchors": [0, 3], "head_maps": [[0, 1]] * 3}}, "below 3"),
        ({"kascade": {"anchors": [2, 0], "head_maps": [[0, 1]] * 3}}, "ascending"),
        ({"kascade": {"anchors": [0], "head_maps": [[0, 1]] * 2}}, "2 layers, the model 3"),
        ({"kascade": {"anchors": [0], "head_maps": [[0, 2]] * 3}}, r"head_maps\[0\]"),
        ({"kascade": {"anchors": [0], "head_maps": [[0]] * 3}}, "2 numbers"),
        ({"policy": "sync_kv"}, "section of that name"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(kascade_file().model_dump(mode="json") | change))
    with pytest.raises(CalibrationError, match=match) as caught:
        read_calibration(path)
    assert "tandemkv calibrate" in str(caught.value)


@pytest.mark.parametrize(
    ("clusters", "representatives"),
    [
        ([[0, 1]] * 3, [[0, 1]] * 2),
        ([[0, 1]] * 3, [[0, 0]] * 3),
        ([[0, 0]] * 3, [[0, 1]] * 3),
        ([[0, 1]] * 3, [[0, 5]] * 3),
        ([[1, 1]] * 3, [[0]] * 3),
    ],
)
def test_representatives_are_one_of_each_cluster(
    tmp_path: Path, clusters: list[list[int]], representatives: list[list[int]]
) -> None:
    path = tmp_path / "file.json"
    section = {"clusters": clusters, "representatives": representatives}
    path.write_text(json.dumps(sync_file().model_dump(mode="json") | {"sync_kv": section}))
    with pytest.raises(CalibrationError, match="representatives"):
        read_calibration(path)


def test_no_file_garbage_and_a_file_too_large(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_calibration(tmp_path / "missing.json")
    path = tmp_path / "file.json"
    path.write_text("{")
    with pytest.raises(CalibrationError, match="JSON"):
        read_calibration(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_calibration(path)
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(CalibrationError, match="too many"):
        read_calibration(path)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"out=.*file/x\.json: cannot be written"):
        write_calibration(kascade_file(), tmp_path / "file" / "x.json")
    (tmp_path / "x.json").mkdir()
    with pytest.raises(CalibrationError, match="cannot be written"):
        write_calibration(kascade_file(), tmp_path / "x.json")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "x.json"}


def test_a_file_of_another_model_or_policy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_calibration(kascade_file(), path)
    with pytest.raises(CalibrationError, match=r"of tiny \(3 layers.*for this model"):
        resolve(path, SMOLLM2)
    with pytest.raises(CalibrationError, match=r"other weights.*hash aa, here bb"):
        resolve(path, msgspec.structs.replace(MODEL, model_hash="bb"))
    with pytest.raises(CalibrationError, match="for policy kascade, not sync_kv"):
        resolve(path, policy="sync_kv")
    resolve(path, msgspec.structs.replace(MODEL, dtype="bfloat16", max_context=64))


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ({"windowed_layers": (0,)}, "attends to a sliding window"),
        ({"linear_layers": (0,)}, "is linear attention"),
    ],
)
def test_an_anchor_that_selects_nothing_is_refused(others: dict[str, Any], what: str) -> None:
    model = msgspec.structs.replace(MODEL, **others)
    capabilities = find_policy("kascade").capabilities
    with pytest.raises(CalibrationError, match=rf"layer 1 follows anchor 0.*{what}.*anchors.*1,2"):
        resolve_calibration(SelectionSettings(policy="kascade", anchors=(0,)), model, capabilities)
    found = resolve_calibration(
        SelectionSettings(policy="kascade", anchors=(1,)), model, capabilities
    )
    assert found.share is not None
    assert found.share.sources == (0, 1, 1)


@pytest.mark.parametrize(
    ("model", "anchors"), [(QWEN3_8B, (0, 2, 7, 14, 23)), (LLAMA31_8B, (0, 2, 8, 13, 14))]
)
def test_the_papers_anchors_are_shipped(model: ModelSpec, anchors: tuple[int, ...]) -> None:
    share = resolve(None, model).share
    assert share is not None
    assert tuple(sorted(set(share.sources))) == anchors
    assert set(share.head_maps) == {tuple(range(8))}


def test_smollm2_is_shipped_for_both() -> None:
    share = resolve(None, SMOLLM2).share
    assert share is not None
    assert len(set(share.sources)) == 5
    assert share.sources[0] == 0
    assert any(row != (0, 1, 2) for row in share.head_maps), "measured head maps"
    clusters = resolve(None, SMOLLM2, policy="sync_kv").clusters
    assert clusters is not None
    assert len(clusters.clusters) == 30


def test_a_policy_that_shares_over_heads_does_not_share_over_layers() -> None:
    with pytest.raises(CalibrationError, match=r"policy=sync_kv .*; drop --share-layers"):
        resolve(None, SMOLLM2, policy="sync_kv", share_layers=True)


def test_no_calibration_says_how_to_make_one() -> None:
    with pytest.raises(CalibrationError, match=r"--policy kascade --out FILE.*--anchors"):
        resolve(None)
    with pytest.raises(CalibrationError, match="--policy sync_kv --out FILE"):
        resolve(None, policy="sync_kv")


def test_anchors_by_hand_have_identity_maps() -> None:
    share = resolve(None, anchors=(0, 1)).share
    assert share is not None
    assert (share.sources, share.head_maps) == ((0, 1, 1), ((0, 1),) * 3)
    with pytest.raises(CalibrationError, match="layers 0 to 2"):
        resolve(None, anchors=(0, 3))


def test_other_policies_share_on_demand_but_not_from_exact_layers() -> None:
    changes = {"policy": "look_ahead", "share_layers": True, "anchors": (0, 1)}
    assert resolve(None, timing=HIDDEN, exact_layers=(0,), **changes).share is not None
    with pytest.raises(CalibrationError, match=r"layer 2 follows anchor 1.*--exact-layers 0,1,2"):
        resolve(None, timing=HIDDEN, exact_layers=(0, 1), **changes)
    with pytest.raises(ValueError, match="ascending"):
        SelectionSettings(anchors=(2, 1))


def test_all_layers_that_would_have_to_be_exact_are_named_at_once() -> None:
    changes = {"policy": "look_ahead", "share_layers": True}
    with pytest.raises(CalibrationError, match=r"exact layer and .* use --exact-layers 0,1,2, or"):
        resolve(None, timing=HIDDEN, exact_layers=(0,), anchors=(0,), **changes)
    with pytest.raises(CalibrationError, match=r"by default and .* use --exact-layers 0,1,2, or"):
        resolve(None, SMOLLM2, timing=HIDDEN, **changes)
    found = resolve(None, SMOLLM2, timing=HIDDEN, exact_layers=(0, 1, 2), **changes)
    assert found.share is not None
