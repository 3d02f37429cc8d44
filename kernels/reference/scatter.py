# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.scatter`."""

import torch


def scatter_pack(
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    fetch_slot: torch.Tensor,
    k_in: torch.Tensor,
    v_in: torch.Tensor,
    *,
    pos_res: torch.Tensor | None = None,
    fetch_pos: torch.Tensor | None = None,
) -> None:
    """Scatter rows; see `tandemkv.kernels.scatter.scatter_pack`."""
    req, head, place = torch.nonzero(fetch_slot >= 0, as_tuple=True)
    row = rows.long()[req]
    slot = fetch_slot[req, head, place].long()
    k_res[row, slot, head] = k_in[req, head, place]
    v_res[row, slot, head] = v_in[req, head, place]
    if pos_res is not None and fetch_pos is not None:
        pos_res[row, head, slot] = fetch_pos[req, head, place]
