# SPDX-License-Identifier: Apache-2.0
"""Everything that lives as long as an epoch; shared by the steps, owned by the session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from .counters import Counters
from .exchange import Exchange
from .mirror import ResidentMirror
from .pack_ledger import PackLedger
from .policies.base import Policy
from .protocol.model_spec import ModelSpec
from .protocol.settings import RankSettings
from .protocol.step_program import StepProgram
from .protocol.tally import DeviceTally
from .row_table import RowTable
from .scratch import Scratch
from .store import KVStore


class QueryPredictor(Protocol):
    """What a step needs of a model adapter."""

    def predict_query(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `model_adapters.base.ModelAdapter.predict_query`."""


@dataclass(slots=True, kw_only=True)
class Epoch:
    """State of one epoch.

    `predictor` is there if the policy's timing needs hidden states, `scratch` on a GPU.
    """

    number: int
    model: ModelSpec
    settings: RankSettings
    program: StepProgram
    exchange: Exchange
    store: KVStore
    rows: RowTable
    mirror: ResidentMirror
    policy: Policy
    predictor: QueryPredictor | None
    counters: Counters
    ledger: PackLedger
    tally: DeviceTally
    scratch: Scratch | None
    device: torch.device
    num_decode_steps: int = field(default=0)
    """Decode steps so far; the time that the mirror's LRU counts in."""

    def release(self, row: int, generation: int) -> None:
        """Forget what is known about an occupancy."""
        self.mirror.release(row, generation)
        self.policy.release((row, generation))
