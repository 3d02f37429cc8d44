# SPDX-License-Identifier: Apache-2.0
"""K and V in FP8 in Triton, against the references on the same numbers in float32.

Run by `test_triton_ops` in a process of its own.
"""

import pytest
import torch
from plain_torch import in_plain_torch
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.samples import make_sample_scratch
from tandemkv.kernels.score import KeyScan
from tandemkv.kernels.triton_ops import append as triton_append
from tandemkv.kernels.triton_ops import attention as triton_attention
from tandemkv.kernels.triton_ops import exchange as triton_exchange
from tandemkv.kernels.triton_ops import quantize as triton_quantize
from tandemkv.kernels.triton_ops import samples as triton_samples
from tandemkv.kernels.triton_ops import score as triton_score

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
append, attention, exchange, quantize, samples, score = (
    in_plain_torch(name)
    for name in ("append", "attention", "exchange", "quantize", "samples", "score")
)
# The interpreter multiplies bfloat16 as if its bits were integers.
QUERY = torch.bfloat16 if DEVICE == "cuda" else torch.float16
HEADS, GROUP, DIM, NUM_SLOTS = 2, 3, 24, 192
SCALE = DIM**-0.5


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[slots, H, D]`` in FP8."""
    torch.manual_seed(8)
    k, v = 2 * torch.randn(2, NUM_SLOTS, HEADS, DIM)
    return k.to(DEVICE, torch.float8_e4m3fn), v.to(DEVICE, torch.float8_e4m3fn)


def queries(count: int) -> torch.Tensor:
    """Queries ``[count, Hq, D]``."""
    return torch.randn(count, HEADS * GROUP, DIM).to(DEVICE, QUERY)


def test_attend_paged() -> None:
    k, v = pools()
    q, hi = queries(2), torch.tensor([150, 33], device=DEVICE)
    slots = torch.stack([torch.randperm(NUM_SLOTS) for _ in hi]).int().to(DEVICE)
    got = triton_attention.attend_paged(q, k, v, slots, hi, scale=SCALE)
    on_cpu = [x.cpu() for x in (q, k.float(), v.float(), slots, hi)]
    want = attention.attend_paged(*on_cpu, scale=SCALE)
    assert_close(got[0], want[0].double(), TOLERANCES[QUERY])
    assert_close(got[1], want[1].double(), TOLERANCES[QUERY])


def test_attend_samples() -> None:
    k, v = pools()
    q, rows = queries(2), torch.tensor([1, 2], device=DEVICE)
    slots = torch.randint(0, NUM_SLOTS, (2, 32), device=DEVICE).int()
    weight, lse = torch.randn(3, HEADS, 32, device=DEVICE), torch.randn(q.shape[:2], device=DEVICE)
    active = torch.tensor([True, True], device=DEVICE)
    want, got = q.clone(), q.clone()
    scratch = make_sample_scratch(2, q.shape[1], 32, q.shape[2], DEVICE)
    sizes = {"scale": SCALE, "lse_unit": 1.0, "scratch": scratch}
    samples.attend_samples(q, k.float(), v.float(), slots, rows, weight, active, want, lse, **sizes)
    triton_samples.attend_samples(q, k, v, slots, rows, weight, active, got, lse, **sizes)
    assert_close(got, want.double(), TOLERANCES[QUERY])


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("pooling", ["softmax_mean", "max_logit"])
def test_score_keys(page_size: int, pooling: str) -> None:
    k, _ = pools()
    num_pages = NUM_SLOTS // page_size
    table = torch.stack([torch.randperm(num_pages) for _ in range(2)]).int().to(DEVICE)
    lo, hi = torch.tensor([[4, 4], [180, 60]], device=DEVICE)
    options = {"width": 180, "scale": SCALE, "pooling": pooling, "page_size": page_size}
    q = queries(2)
    want = score.score_keys(KeyScan(q, k.float(), table, lo, hi, **options))
    got = triton_score.score_keys(KeyScan(q, k, table, lo, hi, **options))
    for req, end in enumerate(hi.tolist()):
        inside = slice(4, end)
        assert_close(got[req, :, inside], want[req, :, inside].double(), TOLERANCES[QUERY])


def test_score_window() -> None:
    k, _ = pools()
    table = torch.randperm(NUM_SLOTS).int().to(DEVICE)
    positions = torch.arange(150, 158, device=DEVICE)
    window = queries(8)
    want = score.score_window(window, k.float(), table, 4, 150, positions, scale=SCALE)
    got = triton_score.score_window(window, k, table, 4, 150, positions, scale=SCALE)
    assert_close(got, want.double(), TOLERANCES[QUERY])


def test_quantized_indexes() -> None:
    k, _ = pools()
    found = []
    # The reference runs on the CPU: on a GPU torch divides by a number through its reciprocal.
    for module, pool in ((quantize, k.float().cpu()), (triton_quantize, k)):
        device = pool.device
        codes = torch.zeros(k.shape, dtype=torch.int8, device=device)
        scale = torch.zeros(k.shape[:2], device=device)
        module.append_int8(pool, torch.tensor([5, -1, 90, 191], device=device), codes, scale)
        pages = torch.zeros(3, HEADS, 64, DIM // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(3, HEADS, 2, DIM, dtype=torch.float16, device=device)
        module.quantize_int4_pages(pool, torch.tensor([2, 0], device=device), pages, scales)
        found.append((codes, scale, pages, scales))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got.cpu(), want)


def test_rows_are_copied_bit_by_bit() -> None:
    k, v = pools()
    table = torch.randperm(NUM_SLOTS).int().to(DEVICE)[None].repeat(2, 1)
    fetch = torch.randint(0, NUM_SLOTS, (2, HEADS, 7), device=DEVICE).int()
    to = torch.stack([torch.randperm(9)[:7] for _ in range(2 * HEADS)]).view(2, HEADS, 7)
    rows, token_slots = torch.tensor([[2, 1], [9, 10]], device=DEVICE)
    found = []
    for copy, write in (
        (exchange.exchange_rows, append.append_tokens),
        (triton_exchange.exchange_rows, triton_append.append_tokens),
    ):
        sets = torch.zeros(2, 3, 12, HEADS, DIM, device=DEVICE).to(torch.float8_e4m3fn)
        copy(k, v, table, fetch, to.int().to(DEVICE), *sets, rows)
        write(k[:2], v[:2], rows, token_slots, *sets, moves=None)
        found.append(sets.view(torch.uint8))
    assert torch.equal(*found)
    assert found[0].count_nonzero() > 2 * 2 * HEADS * 7 * DIM // 2
