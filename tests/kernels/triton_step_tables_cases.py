# SPDX-License-Identifier: Apache-2.0
"""Tables of a step in Triton; run by `test_triton_ops` in a process of its own."""

import dataclasses
import random

import pytest
import torch
from plain_torch import in_plain_torch

from tandemkv.kernels.step_tables import CandidateTables
from tandemkv.kernels.triton_ops import step_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
reference = in_plain_torch("step_tables")
MAX_BATCH, NUM_ROWS = 12, 9
INDEX = pytest.mark.parametrize(
    ("rows_dtype", "lengths_dtype"),
    [
        (torch.int64, torch.int64),
        (torch.int64, torch.int32),
        (torch.int32, torch.int64),
        (torch.int32, torch.int32),
    ],
)
# num_resident, num_recent, num_dense
SIZES = pytest.mark.parametrize(
    "sizes",
    [
        (12, 4, 16),
        (12, 4, 40),
        (12, 4, 0),
        (7, 5, 12),
        (1500, 64, 1564),
        (900, 100, 2100),
        (1, 1, 2),
    ],
)


def _requests(
    seed: int, edges: list[int], longest: int, rows_dtype: torch.dtype, lengths_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths at the edges and anywhere, of rows in any order, with padding between and behind."""
    rng = random.Random(seed)
    near = [edge + by for edge in edges for by in (-1, 0, 1, 2)]
    size = rng.randint(1, MAX_BATCH - 1)
    lengths = [
        rng.choice([rng.randint(1, longest), rng.choice(near), rng.randint(1, 8)])
        for _ in range(size)
    ]
    lengths = [min(longest, max(1, length)) for length in lengths]
    rows = [rng.randrange(NUM_ROWS) for _ in range(size)]
    for request in range(size):
        if rng.random() < 0.2 or request == size - 1:
            rows[request], lengths[request] = 0, rng.choice([1, 1, longest])
    # Views, so that strides count.
    wide = torch.tensor([rows, lengths], device=DEVICE).T
    return wide[:, 0].to(rows_dtype), wide.to(lengths_dtype)[:, 1]


def _filled(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two tensors of what nothing writes."""
    return [torch.full(shape, -7, dtype=dtype, device=DEVICE) for _ in range(2)]


@INDEX
@SIZES
def test_slots_in_the_pool(
    rows_dtype: torch.dtype, lengths_dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    num_resident, num_recent, num_dense = sizes
    most = num_resident + num_recent
    width, longest = max(most, num_dense), 2 * max(most, num_dense) + 9
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(2**31 - 1, (NUM_ROWS, longest), generator=generator)
    table = table.to(DEVICE, lengths_dtype)
    for seed in range(3 if width > 1000 else 8):
        edges = [num_recent, num_resident, most, num_dense, width]
        rows, lengths = _requests(seed, edges, longest, rows_dtype, lengths_dtype)
        slots = _filled(MAX_BATCH, width, dtype=torch.int32)
        attended = _filled(MAX_BATCH, dtype=torch.int64)
        for module, to, count in zip((reference, step_tables), slots, attended, strict=True):
            module.load_attended(
                rows, lengths, table[:, : longest - seed % 2], to, count,
                num_resident=num_resident, num_recent=num_recent, num_dense=num_dense,
                first_slot=100_000,
            )  # fmt: skip
        assert torch.equal(attended[1], attended[0])
        assert torch.equal(slots[1], slots[0])
        assert (slots[1][len(rows) :] == -7).all()


@INDEX
@SIZES
def test_slots_in_sets_of_their_own(
    rows_dtype: torch.dtype, lengths_dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    num_resident, num_recent, num_dense = sizes
    most = num_resident + num_recent
    width, longest = max(most, num_dense), 2 * max(most, num_dense) + 9
    for seed in range(3 if width > 1000 else 8):
        edges = [num_recent, num_resident, most, num_dense, width]
        rows, lengths = _requests(seed, edges, longest, rows_dtype, lengths_dtype)
        slots = _filled(MAX_BATCH, width, dtype=torch.int32)
        attended, set_rows, newest = (_filled(MAX_BATCH, dtype=torch.int64) for _ in range(3))
        for i, module in enumerate((reference, step_tables)):
            module.load_ring(
                rows, lengths, slots[i], attended[i], set_rows[i], newest[i],
                num_resident=num_resident, num_recent=num_recent, num_dense=num_dense,
            )  # fmt: skip
        for want, got in (slots, attended, set_rows, newest):
            assert torch.equal(got, want)
        assert (slots[1][len(rows) :] == -7).all()


def _tables(max_pages: int) -> CandidateTables:
    def full(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 5, dtype=dtype, device=DEVICE)

    return CandidateTables(
        rows=full(MAX_BATCH, dtype=torch.int64),
        positions=full(MAX_BATCH, dtype=torch.int64),
        lengths=full(MAX_BATCH),
        lo=full(MAX_BATCH),
        hi=full(MAX_BATCH),
        num_target=full(MAX_BATCH),
        active=full(MAX_BATCH, dtype=torch.bool),
        pages=full(MAX_BATCH, max_pages),
        step=full(),
        selections=full(4, dtype=torch.int64)[3],
    )


@INDEX
@pytest.mark.parametrize(
    ("page_size", "longest", "max_pages"),
    [(1, 2100, 2300), (1, 70, 40), (16, 330, 30), (64, 90_000, 1300), (48, 500, 9)],
)
def test_candidates(
    rows_dtype: torch.dtype,
    lengths_dtype: torch.dtype,
    page_size: int,
    longest: int,
    max_pages: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randint(-5000, 90_000, (NUM_ROWS, longest), generator=generator)
    first = table.to(DEVICE, torch.int32)[:, ::page_size]
    want, got = _tables(max_pages), _tables(max_pages)
    cold = torch.tensor(50, dtype=torch.int32, device=DEVICE)
    for seed in range(6):
        rows, lengths = _requests(seed, [3, 20, 50, 60], longest, rows_dtype, lengths_dtype)
        for module, tables in ((reference, want), (step_tables, got)):
            module.load_candidates(
                rows, lengths, first, tables, page_size=page_size,
                num_sink=4, num_excluded=3 + 17 * (seed % 3), num_resident=20, num_cold=cold,
                num_layers=[0, 1, 30][seed % 3],
            )  # fmt: skip
        for field in dataclasses.fields(CandidateTables):
            name = field.name
            assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.step == 11
    assert got.selections > 35


def test_no_requests() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    tables, slots = _tables(3), _filled(2, 5, dtype=torch.int32)[0]
    counts = _filled(2, dtype=torch.int64)
    table = torch.zeros(2, 9, dtype=torch.int32, device=DEVICE)
    sizes = {"num_resident": 3, "num_recent": 2, "num_dense": 5}
    step_tables.load_attended(none, none, table, slots, counts[0], first_slot=9, **sizes)
    step_tables.load_ring(none, none, slots, counts[0], counts[1], counts[1], **sizes)
    step_tables.load_candidates(
        none, none, table, tables, page_size=4, num_sink=1, num_excluded=1, num_resident=3,
        num_cold=table[0, 0], num_layers=2,
    )  # fmt: skip
    assert (slots == -7).all()
    assert (counts[0] == -7).all()
    assert (tables.step.item(), tables.selections.item()) == (6, 5)
