# SPDX-License-Identifier: Apache-2.0
"""`gather_pack`, `scatter_pack`, `exchange_rows`, bit by bit against Python loops."""

import pytest
import torch

from tandemkv.kernels.exchange import SampleWeights, exchange_rows
from tandemkv.kernels.pack import gather_pack
from tandemkv.kernels.scatter import scatter_pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw any bit patterns, NaN payloads and infinities included."""
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return bits.view(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("cap", [1, 5])
def test_gather_copies_rows_and_zeroes_padding(dtype: torch.dtype, layout: str, cap: int) -> None:
    torch.manual_seed(0)
    num_reqs, heads, dim = 3, 2, 7
    pools = [random_bits(2, 40, heads, dim, dtype=dtype) for _ in range(2)]
    pools = [pool.transpose(0, 1)[:, 1] if layout == "strided" else pool[1] for pool in pools]
    outs = [random_bits(num_reqs, heads, 2 * cap, dim, dtype=dtype) for _ in range(2)]
    outs = [
        out[:, :, ::2] if layout == "strided" else out.view(2, num_reqs, heads, cap, dim)[0]
        for out in outs
    ]
    slots = torch.stack([torch.randperm(40)[:20] for _ in range(num_reqs)]).int()
    slots[:, 0] = 99999  # what is not asked for need not be a slot
    fetch = torch.randint(1, 20, (num_reqs, heads, cap), dtype=torch.int32)
    fetch[torch.rand(fetch.shape) < 0.3] = -1
    fetch[1] = -1
    gather_pack(pools[0], pools[1], slots, fetch, outs[0], outs[1])
    for pool, out in zip(pools, outs, strict=True):
        for req in range(num_reqs):
            for head in range(heads):
                for place, position in enumerate(fetch[req, head].tolist()):
                    row = as_bits(out[req, head, place])
                    if position < 0:
                        assert not row.any()
                    else:
                        want = pool[int(slots[req, position]), head]
                        assert torch.equal(row, as_bits(want))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 2, 0), (2, 2, 3)])
def test_gather_of_nothing(shape: tuple[int, int, int]) -> None:
    pool, out = torch.ones(4, 2, 3), torch.ones(*shape, 3)
    fetch = torch.full(shape, -1, dtype=torch.int32)
    gather_pack(pool, pool, torch.zeros(shape[0], 0).int(), fetch, out, out.clone())
    assert not out.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_scatter_writes_what_is_named_and_nothing_else(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(1)
    num_rows, num_slots, heads, dim, cap = 5, 11, 2, 6, 4
    res = [random_bits(num_rows, num_slots, heads, dim, dtype=dtype) for _ in range(2)]
    if layout == "strided":
        res = [r.transpose(0, 1).contiguous().transpose(0, 1) for r in res]
    want = [r.clone() for r in res]
    rows = torch.tensor([4, 1, 3])
    fetch_slot = torch.stack(
        [torch.stack([torch.randperm(num_slots)[:cap] for _ in range(heads)]) for _ in rows]
    ).int()
    fetch_slot[torch.rand(fetch_slot.shape) < 0.3] = -1
    fetch_slot[1] = -1
    fetch_pos = torch.randint(0, 99, fetch_slot.shape, dtype=torch.int32)
    pos_res = torch.full((num_rows, heads, num_slots), -1, dtype=torch.int32)
    want_pos = pos_res.clone()
    packs = [random_bits(3, heads, cap, dim, dtype=dtype) for _ in range(2)]
    scatter_pack(
        res[0], res[1], rows, fetch_slot, packs[0], packs[1], pos_res=pos_res, fetch_pos=fetch_pos
    )
    for req, head, place in torch.cartesian_prod(
        torch.arange(3), torch.arange(heads), torch.arange(cap)
    ).tolist():
        slot = int(fetch_slot[req, head, place])
        if slot >= 0:
            want_pos[rows[req], head, slot] = fetch_pos[req, head, place]
            for target, pack in zip(want, packs, strict=True):
                target[rows[req], slot, head] = pack[req, head, place]
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(res, want, strict=True))
    assert torch.equal(pos_res, want_pos)


def test_round_trip() -> None:
    torch.manual_seed(2)
    pool = torch.randn(30, 2, 4)
    slots = torch.randperm(30)[None]
    fetch_pos = torch.tensor([[[3, 1, 17], [2, 29, -1]]], dtype=torch.int32)
    fetch_slot = torch.tensor([[[0, 2, 1], [1, 0, -1]]], dtype=torch.int32)
    packs, res = torch.empty(2, 1, 2, 3, 4), torch.zeros(2, 2, 3, 2, 4)
    gather_pack(pool, -pool, slots, fetch_pos, packs[0], packs[1])
    scatter_pack(res[0], res[1], torch.tensor([1]), fetch_slot, packs[0], packs[1])
    assert torch.equal(res[0, 1, 2, 0], pool[slots[0, 1], 0])
    assert torch.equal(res[1, 1, 0, 1], -pool[slots[0, 29], 1])
    assert not res[:, 0].any()
    assert not res[:, 1, 2, 1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_exchange_copies_what_gather_and_scatter_would(dtype: torch.dtype, page_size: int) -> None:
    torch.manual_seed(3)
    heads, dim, cap, num_slots = 2, 5, 6, 9
    pools = random_bits(2, 12 * page_size, heads, dim, dtype=dtype)
    table = torch.stack([torch.randperm(12)[:7] for _ in range(3)])
    fetch = torch.randint(0, 7 * page_size, (3, heads, cap), dtype=torch.int32)
    fetch[torch.rand(fetch.shape) < 0.3] = -1
    to = torch.rand(3, heads, num_slots).argsort(-1)[..., :cap].int()
    to[torch.rand(to.shape) < 0.2] = -1
    rows = torch.tensor([3, 0, 2])
    res = random_bits(2, 4, num_slots, heads, dim, dtype=dtype)
    want = res.clone()
    pos_res = torch.full((4, heads, num_slots), -1, dtype=torch.int32)
    want_pos = pos_res.clone()
    exchange_rows(*pools, table, fetch, to, *res, rows, page_size=page_size, pos_res=pos_res)
    for req, head, place in torch.cartesian_prod(
        torch.arange(3), torch.arange(heads), torch.arange(cap)
    ).tolist():
        position, slot = int(fetch[req, head, place]), int(to[req, head, place])
        if position >= 0 and slot >= 0:
            page, rest = divmod(position, page_size)
            source = int(table[req, page]) * page_size + rest
            want[:, rows[req], slot, head] = pools[:, source, head]
            want_pos[rows[req], head, slot] = position
    assert torch.equal(as_bits(res), as_bits(want))
    assert torch.equal(pos_res, want_pos)
    packs = random_bits(2, 3, heads, cap, dim, dtype=dtype)
    gather_pack(*pools, table, fetch, *packs, page_size=page_size)
    for req, head, place in (fetch >= 0).nonzero().tolist():
        page, rest = divmod(int(fetch[req, head, place]), page_size)
        source = int(table[req, page]) * page_size + rest
        assert torch.equal(as_bits(packs[:, req, head, place]), as_bits(pools[:, source, head]))
    assert not as_bits(packs.transpose(0, 1).movedim(1, 3)[fetch < 0]).any()


def test_exchange_raises_its_flag_even_for_nothing() -> None:
    pool, res = torch.ones(4, 2, 3), torch.zeros(2, 6, 2, 3)
    table, rows = torch.zeros(1, 4).int(), torch.zeros(1).int()
    fetch = torch.full((1, 2, 3), -1, dtype=torch.int32)
    for found in (fetch, torch.arange(3).expand(1, 2, 3).int().contiguous()):
        flag, num_done = torch.zeros(2, 1, dtype=torch.int32)
        exchange_rows(pool, pool, table, found, found, res, res, rows, flag=flag, num_done=num_done)
        assert (flag.item(), num_done.item()) == (1, 0)
    for wrong in ({"flag": flag}, {"num_done": num_done}, {"flag": flag, "num_done": num_done[:0]}):
        with pytest.raises(ValueError, match=r"num_done|flag"):
            exchange_rows(pool, pool, table, fetch, fetch, res, res, rows, **wrong)


@pytest.mark.parametrize("cap", [0, 3])
def test_exchange_carries_weights_of_active_requests(cap: int) -> None:
    """Whether or not rows are fetched; of two requests with one row only one is active."""
    pool, res = torch.ones(4, 2, 3), torch.zeros(5, 6, 2, 3)
    table, rows = torch.zeros(4, 4).int(), torch.tensor([3, 0, 0, 1])
    fetch = torch.full((4, 2, cap), -1, dtype=torch.int32)
    source = torch.randn(5, 2, 6)
    source[3, 1] = -torch.inf
    target = torch.full((2, 5, 2, 6), 7.0)
    active = torch.tensor([True, False, True, False])
    flag, num_done = torch.zeros(2, 1, dtype=torch.int32)
    exchange_rows(
        pool, pool, table, fetch, fetch, res, res, rows, flag=flag, num_done=num_done,
        weights=SampleWeights(source=source, target=target[1], active=active),
    )  # fmt: skip
    assert flag.item() == 1
    assert torch.equal(target[1, [0, 3]], source[[0, 3]])
    assert (target[1, [1, 2, 4]] == 7).all()
    assert (target[0] == 7).all()
    assert not res.any()
    good = {"source": source, "target": target[0], "active": active}
    for name, wrong in (
        ("source", source.double()), ("target", target[0, :4]), ("target", target[0, :, :, :4]),
        ("target", source.mT.contiguous().mT), ("active", active.int()), ("active", active[:2]),
    ):  # fmt: skip
        weights = SampleWeights(**{**good, name: wrong})
        with pytest.raises(ValueError, match=rf"weights\.{name}"):
            exchange_rows(pool, pool, table, fetch, fetch, res, res, rows, weights=weights)
    odd = SampleWeights(source=source[..., :5], target=target[0, ..., :5], active=active)
    with pytest.raises(ValueError, match="num_samples=5"):
        exchange_rows(pool, pool, table, fetch, fetch, res, res, rows, weights=odd)


def test_exchange_of_nothing() -> None:
    pool, res = torch.ones(4, 2, 3), torch.zeros(2, 6, 2, 3)
    fetch = torch.full((1, 2, 5), -1, dtype=torch.int32)
    exchange_rows(pool, pool, torch.zeros(1, 0).int(), fetch, fetch, res, res, torch.zeros(1).int())
    assert not res.any()


def test_bad_arguments() -> None:
    pool, out = torch.zeros(4, 2, 3), torch.zeros(1, 2, 5, 3)
    slots, fetch = torch.zeros(1, 9).int(), torch.zeros(1, 2, 5).int()
    with pytest.raises(ValueError, match=r"k_out\.shape=\(1, 2, 4, 3\): must be \[num_reqs=1"):
        gather_pack(pool, pool, slots, fetch, out[:, :, :4], out)
    with pytest.raises(ValueError, match=r"v_out\.dtype"):
        gather_pack(pool, pool, slots, fetch, out, out.half())
    with pytest.raises(ValueError, match=r"fetch_pos\.dtype"):
        gather_pack(pool, pool, slots, fetch.long(), out, out)
    with pytest.raises(ValueError, match="page_size=0"):
        gather_pack(pool, pool, slots, fetch, out, out, page_size=0)
    res, rows = torch.zeros(2, 6, 2, 3), torch.zeros(1).int()
    with pytest.raises(ValueError, match=r"k_res\.dtype"):
        exchange_rows(pool, pool, slots, fetch, fetch, res.half(), res, rows)
    with pytest.raises(ValueError, match=r"fetch_slot\.shape"):
        exchange_rows(pool, pool, slots, fetch, fetch[..., :2], res, res, rows)
    with pytest.raises(ValueError, match="page_size=-1"):
        exchange_rows(pool, pool, slots, fetch, fetch, res, res, rows, page_size=-1)
    with pytest.raises(ValueError, match="pos_res"):
        scatter_pack(res, res, rows, fetch, out, out, fetch_pos=fetch)
    with pytest.raises(ValueError, match=r"fetch_slot\.shape.*num_reqs=0"):
        scatter_pack(res, res, rows[:0], fetch, out, out)
