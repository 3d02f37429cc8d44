# SPDX-License-Identifier: Apache-2.0
"""Triton's scores and quantization against float64; run by `test_triton_score` in a process."""

import pytest
import torch
from score_inputs import (
    EXACT_LOGITS,
    KINDS,
    NATIVE,
    ON_GPU,
    among_others,
    expected,
    magnitude,
    make_keys,
    scan_of,
)
from tolerances import assert_close

from tandemkv.kernels import quantize as operations
from tandemkv.kernels.score import POOLINGS, KeyScan, make_score_scratch
from tandemkv.kernels.triton_ops import quantize
from tandemkv.kernels.triton_ops import score as triton_score

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LO = [4, 0, 17, 9, 130]
HI = [171, 64, 17, 3, 131]  # two without candidates, one with one


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 128), (4, 64), (4, 128)])
def test_score_keys(kind: str, page_size: int, group: int, dim: int) -> None:
    if kind == "int4" and page_size == 1:
        page_size = 128  # int4 has no pages of one token; a tile is half of this one, or as long
    torch.manual_seed(group * dim + page_size)
    num_pages = 5 * -(-190 // page_size)
    keys = make_keys(
        kind, num_reqs=5, heads=2, group=group, dim=dim, page_size=page_size,
        num_pages=num_pages, device=DEVICE,
    )  # fmt: skip
    if kind in NATIVE:  # what is no candidate may hold anything
        is_candidate = torch.zeros(len(keys.k_pool), dtype=torch.bool, device=DEVICE)
        for req, (lo, hi) in enumerate(zip(LO, HI, strict=True)):
            at = torch.arange(lo, max(lo, hi), device=DEVICE)
            pages = keys.table[req].long()[at // page_size]
            is_candidate[pages * page_size + at % page_size] = True
        keys.k_pool[~is_candidate] = float("nan")
    scratch = make_score_scratch(6, 2 * group, 2, 300, torch.device(DEVICE))
    for buffer in (scratch.logits, scratch.tile_max, scratch.zero_dot, scratch.split_lse):
        buffer.fill_(float("nan"))
    for pooling in POOLINGS:
        out = torch.full((5, 2, 190), float("nan"), device=DEVICE)
        arguments = (keys.q, keys.k_pool, keys.table, tensor(LO), tensor(HI))
        options = {"scale": dim**-0.5, "pooling": pooling, "page_size": page_size}
        options["k_scale"] = keys.k_scale
        given = triton_score.score_keys(
            KeyScan(*arguments, width=180, **options), out=out, scratch=scratch
        )
        assert given is out
        # Without `out` what is no candidate is -inf; one pooling shows it.
        scores = None
        if pooling == POOLINGS[0]:
            scores = triton_score.score_keys(KeyScan(*arguments, width=171, **options))
        is_exact = kind == "float32" and pooling != "softmax_mean"
        for req, (lo, hi) in enumerate(zip(LO, HI, strict=True)):
            if scores is not None:
                assert (scores[req, :, :lo] == float("-inf")).all()
                assert (scores[req, :, max(lo, hi) :] == float("-inf")).all()
                assert scores[req, :, lo : max(lo, hi)].isfinite().all()
            if lo >= hi:
                continue
            want = expected(keys, req, lo, hi, pooling, dim**-0.5)
            largest = magnitude(keys, req, lo, hi, pooling, dim**-0.5)
            tolerance = EXACT_LOGITS if is_exact else ON_GPU
            if scores is not None:
                assert_close(scores[req, :, lo:hi] / largest, want / largest, tolerance)
            assert_close(out[req, :, lo:hi] / largest, want / largest, tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_keys_of_some_channels_of_queries(kind: str, dim: int) -> None:
    torch.manual_seed(dim)
    keys = make_keys(
        kind, num_reqs=2, heads=3, group=4, dim=dim, page_size=16, num_pages=20, device=DEVICE
    )
    wide, channels = among_others(keys.q, 3)
    arguments = (keys.k_pool, keys.table, tensor([4, 0]), tensor([150, 90]))
    options = {"width": 160, "scale": 0.2, "k_scale": keys.k_scale, "page_size": 16}
    want = triton_score.score_keys(KeyScan(keys.q, *arguments, **options))
    assert torch.equal(
        triton_score.score_keys(KeyScan(wide, *arguments, channels=channels, **options)), want
    )


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_odd_shapes(kind: str) -> None:
    """Head sizes that are no power of two, and more heads in a group than tensor cores pad to."""
    torch.manual_seed(5)
    page_size = 32 if kind == "int4" else 24
    keys = make_keys(
        kind,
        num_reqs=2,
        heads=1,
        group=12,
        dim=80,
        page_size=page_size,
        num_pages=10,
        device=DEVICE,
    )
    lo, hi = [3, 1], [97, 90]
    for pooling in POOLINGS:
        scores = triton_score.score_keys(
            scan_of(keys, tensor(lo), tensor(hi), width=97, scale=0.1, pooling=pooling)
        )
        for req in range(2):
            want = expected(keys, req, lo[req], hi[req], pooling, 0.1)
            got = scores[req, :, lo[req] : hi[req]]
            largest = magnitude(keys, req, lo[req], hi[req], pooling, 0.1)
            assert_close(got / largest, want / largest, ON_GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "page_size"), [(64, 16), (128, 64), (128, 128), (20, 32)])
@pytest.mark.parametrize("kept", [None, 10])
def test_quantize_equals_the_reference(
    dtype: torch.dtype, dim: int, page_size: int, kept: int | None
) -> None:
    torch.manual_seed(7)
    num_pages, heads = 7, 3
    channels, full = None, dim
    if kept is not None:
        channels = torch.stack([torch.randperm(dim)[:kept] for _ in range(heads)])
        dim = kept
    k_pool = (torch.randn(num_pages * page_size, heads, full) * 5).to(dtype).to(DEVICE)
    k_pool[:page_size, 1] = 0.25  # a page without any spread
    int4 = [
        torch.full((num_pages, heads, page_size, dim // 2), 77, dtype=torch.uint8) for _ in "ab"
    ]
    int4_scales = [torch.full((num_pages, heads, 2, dim), 7.0).half() for _ in "ab"]
    int8 = [torch.full((*k_pool.shape[:2], dim), 77, dtype=torch.int8) for _ in "ab"]
    int8_scales = [torch.full(k_pool.shape[:2], 7.0) for _ in "ab"]
    pages, slots = tensor([0, 5, -1, 2]), tensor([3, 17, -1, 40, 41])
    table = tensor([4, 6, 1, 3, 1, 4, 3, 6]).view(2, 4)[:, :3]
    lengths = tensor([2 * page_size, 2 * page_size - 1])
    # The reference runs on the CPU: on a GPU torch divides by a number through its reciprocal.
    for i, (run, device) in enumerate(((quantize, DEVICE), (operations, "cpu"))):
        for buffers in (int4, int4_scales, int8, int8_scales):
            buffers[i] = buffers[i].to(device)
        pool, rows, ends = k_pool.to(device), table.to(device), lengths.to(device)
        own = None if channels is None else channels.to(device)
        run.quantize_int4_pages(pool, pages.to(device), int4[i], int4_scales[i], own)
        run.append_int4(pool, rows, ends, int4[i], int4_scales[i], own)
        run.append_int4(pool, rows, torch.zeros_like(ends), int4[i], int4_scales[i], own)
        run.append_int8(pool, slots.to(device), int8[i], int8_scales[i], own)
    for buffers in (int4, int4_scales, int8, int8_scales):
        assert torch.equal(buffers[0].cpu(), buffers[1])
    is_written = int4[0].ne(77).flatten(1).any(dim=1)
    assert is_written.tolist() == [True, False, True, False, False, True, True]
