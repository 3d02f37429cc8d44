# SPDX-License-Identifier: Apache-2.0
"""Whole tokens out of a pool; `test_triton_ops` runs the Triton kernel."""

from __future__ import annotations

import pytest
import torch

from tandemkv.kernels.gather import gather_tokens


def test_tokens_come_in_the_order_of_their_slots() -> None:
    pool = torch.arange(2 * 6 * 4.0).view(2, 6, 2, 2)
    out = torch.zeros(2, 3, 2, 2)
    gather_tokens(*pool, torch.tensor([5, 0, 5]), *out)
    assert torch.equal(out, pool[:, [5, 0, 5]])


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("k_out", torch.zeros(2, 2, 2), "num_tokens=3"),
        ("v_out", torch.zeros(3, 2, 2).half(), "dtype"),
        ("v_pool", torch.zeros(6, 2, 4)[..., ::2], "dense"),
        ("slots", torch.zeros(3), "slots.dtype"),
    ],
)
def test_wrong_arguments_are_refused(name: str, wrong: torch.Tensor, text: str) -> None:
    given = {
        "k_pool": torch.zeros(6, 2, 2), "v_pool": torch.zeros(6, 2, 2),
        "slots": torch.tensor([5, 0, 5]), "k_out": torch.zeros(3, 2, 2),
        "v_out": torch.zeros(3, 2, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        gather_tokens(**(given | {name: wrong}))
