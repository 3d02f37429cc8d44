# SPDX-License-Identifier: Apache-2.0
"""Records, for evaluation, which tokens the policy chose in each step.

With ``evaluation`` on, ``TANDEMKV_PROBE_FILE`` and ``TANDEMKV_PROBE_DETAIL=1`` set. The inference
rank's probe writes to the file, this one beside it: one JSON line per (step, request, layer).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from tandemkv.cache_rank.protocol.bitmap import position_bits
from tandemkv.cache_rank.protocol.engine import PADDING_ROW
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    DETAIL_VARIABLE,
    PROBE_VARIABLE,
    RankSettings,
)


def selection_file(probe_file: Path) -> Path:
    """Return where selections are recorded, beside the inference rank's `probe_file`."""
    return probe_file.with_name(f"{probe_file.name}.selected")


class SelectionProbe:
    """Appends to `path` what is chosen. Waits for the device."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def from_settings(cls, settings: RankSettings) -> SelectionProbe | None:
        """Return the probe, if evaluation is on and it was asked for."""
        path = os.environ.get(PROBE_VARIABLE)
        if not path or not settings.evaluation or os.environ.get(DETAIL_VARIABLE) != "1":
            return None
        return cls(selection_file(Path(path)))

    def record(
        self,
        layer: int,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        asked: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Write down ``chosen [B, H, K]`` int32 positions, ``-1`` for none, of asked requests.

        ``rows, lengths, asked [B]``: integers, integers, and bool for whom something is selected.
        """
        requests = zip(rows.tolist(), lengths.tolist(), asked.tolist(), chosen, strict=True)
        with self._path.open("a", encoding="utf-8") as file:
            for row, length, is_asked, heads in requests:
                if row == PADDING_ROW or not is_asked or bool((heads < 0).all()):
                    continue
                line = {
                    "row": row,
                    "layer": layer,
                    "length": length,
                    "selected_bits": [position_bits(head, length) for head in heads],
                }
                file.write(json.dumps(line) + "\n")
