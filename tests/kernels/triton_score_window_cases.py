# SPDX-License-Identifier: Apache-2.0
"""Triton's `score_window` against float64; run by `test_triton_score` in a process of its own."""

import math

import pytest
import torch
from score_inputs import KINDS, NATIVE, ON_GPU, Keys, expected_window, make_keys
from tolerances import TOLERANCES, Tolerance, assert_close

from tandemkv.kernels.triton_ops import score_window as window_ops
from tandemkv.kernels.triton_ops.score import score_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Queries that are not rounded, times keys that are not: only exponentials and sums are left.
UNROUNDED = Tolerance(abs_error=2e-5, rel_error=1e-4, cosine_gap=1e-9)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds NaN: nothing may be read before it is written."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> torch.Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def make_queries(kind: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, kind) if kind in NATIVE else torch.bfloat16
    return torch.randn(*shape, 2).to(dtype).to(DEVICE)[..., 0]  # in no dimension dense


def check(
    keys: Keys, q_window: torch.Tensor, lo: int, hi: int, positions: list[int], scale: float
) -> torch.Tensor:
    got = score_window(
        q_window, keys.k_pool, keys.table[0], lo, hi, torch.tensor(positions, device=DEVICE),
        scale=scale, k_scale=keys.k_scale, page_size=keys.page_size,
    )  # fmt: skip
    assert got.dtype == torch.float32
    assert got.stride(0) % 64 == 0
    want = expected_window(keys, q_window, lo, hi, positions, scale)
    if keys.k_pool.dtype == torch.uint8:  # keys are rounded to float16
        largest = want.max().clamp(min=1e-30)
        assert_close(got / largest, want / largest, ON_GPU)
    else:
        is_exact = keys.k_pool.dtype == torch.float32
        assert_close(got, want, TOLERANCES[torch.float32] if is_exact else UNROUNDED)
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lo", "hi"), [(3, 260), (0, 1), (250, 262), (5, 5), (200, 288)])
def test_ranges(kind: str, lo: int, hi: int) -> None:
    """Tiles as they are on a GPU; queries before, among and behind the candidates."""
    torch.manual_seed(6)
    keys = make_keys(
        kind, num_reqs=1, heads=2, group=3, dim=20, page_size=16, num_pages=18, device=DEVICE
    )
    got = check(
        keys, make_queries(kind, 7, 6, 20), lo, hi, [0, 2, 3, 140, 250, 256, 270], scale=0.2
    )
    assert (got[:, :lo] == -math.inf).all()
    assert (got[:, 271:] == 0).all()


@pytest.mark.parametrize(
    ("kind", "page_size", "group", "dim"),
    [
        ("int4", 16, 3, 20),
        ("int4", 64, 4, 64),
        ("int4", 128, 4, 128),
        ("int8", 1, 3, 20),
        ("int8", 64, 4, 64),
        ("bfloat16", 1, 4, 128),
        ("bfloat16", 24, 3, 20),
        ("bfloat16", 128, 4, 64),
        ("float16", 64, 3, 20),
        ("float32", 64, 4, 64),
    ],
)
def test_parts(
    kind: str, page_size: int, group: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parts of several tiles, and blocks of rows of which the last is not full."""
    torch.manual_seed(group + page_size)
    tiles = [
        window_ops.Tuning(rows=rows, tokens=tokens, stages=2, warps=4, registers=None)
        for rows, tokens in ((32, 32), (16, 64))
    ]
    monkeypatch.setattr(window_ops, "TUNING", dict.fromkeys(window_ops.TUNING, tiles))
    monkeypatch.setattr(window_ops, "PROGRAMS_PER_SM", 1000)
    monkeypatch.setattr(window_ops, "MAX_SPLITS", 3)
    num_pages = -(-240 // page_size)
    keys = make_keys(
        kind, num_reqs=1, heads=2, group=group, dim=dim, page_size=page_size,
        num_pages=num_pages + 2, device=DEVICE,
    )  # fmt: skip
    lo, hi = 69, 237
    keys.table[:, : lo // page_size] = keys.table[:, -(-hi // page_size) :] = 1 << 30
    if kind in NATIVE:  # what is no candidate may hold anything
        at = torch.arange(lo, hi, device=DEVICE)
        is_candidate = torch.zeros(len(keys.k_pool), dtype=torch.bool, device=DEVICE)
        is_candidate[keys.table[0].long()[at // page_size] * page_size + at % page_size] = True
        keys.k_pool[~is_candidate] = math.nan
    q_window = make_queries(kind, 9, 2 * group, dim)
    positions = [60, 69, *range(229, 236)]
    got = check(keys, q_window, lo, hi, positions, scale=dim**-0.5)
    assert (got[:, 236] == 0).all()


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_large_queries_behind_all(kind: str) -> None:
    torch.manual_seed(8)
    keys = make_keys(
        kind, num_reqs=1, heads=1, group=2, dim=64, page_size=32, num_pages=3, device=DEVICE
    )
    q_window = make_queries("bfloat16", 4, 2, 64).float()
    for power in (-60, 60):  # beyond float16 either way
        check(keys, q_window * 2.0**power, 0, 90, [130, 140, 150, 200], scale=0.1 * 2.0**-power)


def test_short_windows_take_the_kernels_of_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each other combination of constants is compiled while requests wait."""
    constants: list[dict[str, object]] = []

    class Recorder:
        def __init__(self, kernel: object) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> object:
            def launch(*args: object, **options: object) -> None:
                constants.append(options)
                self.kernel[grid](*args, **options)  # type: ignore[index]

            return launch

    for name in ("lse_kernel", "weigh_kernel"):
        monkeypatch.setattr(window_ops, name, Recorder(getattr(window_ops, name)))
    keys = make_keys(
        "int4", num_reqs=1, heads=2, group=4, dim=64, page_size=16, num_pages=12, device=DEVICE
    )
    for window in (64, 1, 5, 33):
        positions = list(range(170 - window, 170))
        check(keys, make_queries("int4", window, 8, 64), 2, 160, positions, 0.1)
    assert len(constants) == 8
    assert all(found in constants[:2] for found in constants)
