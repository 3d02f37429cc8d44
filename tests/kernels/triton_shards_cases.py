# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton on some heads of a wider pool, as several cache ranks use it.

What a view of the heads gives is what a copy of them does, and other heads stay as they are. Run by
`test_triton_ops` in a process of its own.
"""

import pytest
import torch

from tandemkv.kernels.exchange import SampleWeights
from tandemkv.kernels.triton_ops import exchange, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, PAGE, PAGES = 8, 16, 16, 6
PARTS = [(0, 2), (2, 5), (5, 8)]
"""Of three cache ranks."""


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize(("start", "end"), PARTS)
def test_rows_and_weights_of_some_heads(start: int, end: int) -> None:
    pools, table = random(2, PAGES * PAGE, HEADS, DIM), torch.randperm(PAGES).int()[None]
    shape = (1, end - start, 20)
    positions = torch.randint(-3, PAGES * PAGE, shape, dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(40)[:20].expand(shape).int().contiguous().to(DEVICE)
    rows, active = torch.tensor([1], device=DEVICE), torch.tensor([True], device=DEVICE)
    resident, before = random(2, 3, 40, HEADS, DIM), random(3, HEADS, 6, dtype=torch.float32)
    weights, source = before.clone(), random(3, end - start, 6, dtype=torch.float32)
    want = resident.clone()
    alone = [part[..., start:end, :].contiguous() for part in (*pools, *want)]
    target = before[:, start:end].contiguous()
    arguments = table.to(DEVICE), positions, slots
    exchange.exchange_rows(
        *alone[:2], *arguments, *alone[2:], rows, page_size=PAGE,
        weights=SampleWeights(source=source, target=target, active=active),
    )  # fmt: skip
    for part, found in zip(want, alone[2:], strict=True):
        part[..., start:end, :] = found
    views = [part[..., start:end, :] for part in (*pools, *resident)]
    exchange.exchange_rows(
        *views[:2], *arguments, *views[2:], rows, page_size=PAGE,
        weights=SampleWeights(source=source, target=weights[:, start:end], active=active),
    )  # fmt: skip
    assert torch.equal(resident, want)
    assert torch.equal(weights[:, start:end], target)
    assert torch.equal(weights[1, start:end], source[1])
    assert torch.equal(weights[:, :start], before[:, :start])
    assert torch.equal(weights[:, end:], before[:, end:])


@pytest.mark.parametrize(("start", "end"), PARTS)
def test_an_index_of_some_heads(start: int, end: int) -> None:
    pool, heads = random(PAGES * PAGE, HEADS, DIM), end - start
    pages = torch.randperm(PAGES)[:4].int().to(DEVICE)
    lengths = torch.tensor([2 * PAGE, PAGE + 3], device=DEVICE)
    slots = torch.randperm(PAGES * PAGE)[:30].to(DEVICE)
    found = []
    for keys in (pool[:, start:end], pool[:, start:end].contiguous()):
        codes = torch.zeros(2, PAGES, heads, PAGE, DIM // 2, dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(2, PAGES, heads, 2, DIM, dtype=torch.float16, device=DEVICE)
        quantize.quantize_int4_pages(keys, pages, codes[0], scales[0])
        quantize.append_int4(keys, pages.view(2, 2), lengths, codes[1], scales[1])
        whole = torch.zeros(PAGES * PAGE, heads, DIM, dtype=torch.int8, device=DEVICE)
        steps = torch.zeros(PAGES * PAGE, heads, device=DEVICE)
        quantize.append_int8(keys, slots, whole, steps)
        found.append((codes, scales, whole, steps))
    for of_view, of_copy in zip(*found, strict=True):
        assert bool(of_copy.any())
        assert torch.equal(of_view, of_copy)
