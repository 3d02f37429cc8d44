# SPDX-License-Identifier: Apache-2.0
"""Which data plane a rank opens, by name and device. None is opened here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol import gloo_transport, host_staged, nccl_transport
from tandemkv.cache_rank.protocol.connect import check_transport, connect_transport
from tandemkv.cache_rank.protocol.errors import SettingsError


@pytest.mark.parametrize(
    ("transport", "device", "opened"),
    [
        ("gloo", "cpu", "gloo"),
        ("gloo", "cuda", ("staged", "gloo", torch.device("cuda"))),
        ("nccl", "cuda", "nccl"),
    ],
)
def test_the_setting_names_it_and_a_gpu_has_gloo_staged(
    transport: str, device: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_transport, "connect_gloo", lambda *_, **__: "gloo")
    monkeypatch.setattr(nccl_transport, "connect_nccl", lambda *_, **__: "nccl")
    monkeypatch.setattr(host_staged, "HostStagedTransport", lambda *given: ("staged", *given))
    found: Any = connect_transport(
        transport, Path("store"), rank=0, timeout_s=1.0, device=torch.device(device)
    )
    assert found == opened


@pytest.mark.parametrize(
    ("transport", "device", "advice"),
    [("nccl", "cpu", "--transport gloo"), ("peer", "cuda", "--transport nccl or gloo")],
)
def test_what_does_not_move_these_tensors_is_refused(
    transport: str, device: str, advice: str
) -> None:
    with pytest.raises(SettingsError, match=f"transport={transport} .* {device}; use {advice}$"):
        check_transport(transport, torch.device(device))
