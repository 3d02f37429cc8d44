# SPDX-License-Identifier: Apache-2.0
"""Int8 and int4 key indexes: error bounds, in-place forms, layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import dequantized, int4_bound

from tandemkv.kernels.quantize import append_int4, append_int8, quantize_int4_pages, quantize_int8


def int4_buffers(
    num_pages: int, heads: int, page_size: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(num_pages, heads, page_size, dim // 2, dtype=torch.uint8)
    return codes, torch.zeros(num_pages, heads, 2, dim, dtype=torch.float16)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**16), spread=st.floats(0, 50), offset=st.floats(-200, 200),
    page_size=st.sampled_from([1, 5, 16, 64]), half=st.integers(1, 9),
)  # fmt: skip
def test_int4_stays_within_its_bound(
    seed: int, spread: float, offset: float, page_size: int, half: int
) -> None:
    torch.manual_seed(seed)
    keys = torch.randn(3 * page_size, 2, 2 * half) * spread + torch.randn(2 * half) * offset
    codes, scales = int4_buffers(3, 2, page_size, 2 * half)
    quantize_int4_pages(keys, torch.tensor([2, 0]), codes, scales)
    error = (dequantized(codes, scales) - keys.double()).abs().view(3, page_size, 2, 2 * half)
    bound = int4_bound(keys.view(error.shape), scales)
    for page in (0, 2):
        assert (error[page] <= bound[page]).all()
    assert not codes[1].any()
    assert not scales[1].any()


def test_int4_layout_and_rounding_by_hand() -> None:
    keys = torch.zeros(2, 1, 4)
    keys[:, 0, 0] = torch.tensor([-1.0, 14.0])  # scale 1, zero -1: codes 0, 15
    keys[:, 0, 2] = torch.tensor([3.0, 33.0])  # scale 2, zero 3: codes 0, 15
    keys[:, 0, 3] = 7.0  # no spread: scale 0
    codes, scales = int4_buffers(1, 1, 2, 4)
    quantize_int4_pages(keys, torch.tensor([0, -1]), codes, scales)
    assert codes.tolist() == [[[[0, 0], [255, 0]]]]
    assert scales.tolist() == [[[[1, 0, 2, 0], [-1, 0, 3, 7]]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_int4_equals_bulk(dtype: torch.dtype) -> None:
    page_size, table = 16, torch.tensor([[4, 2, 0], [1, 3, 5]], dtype=torch.int32)
    k_pool = torch.randn(6 * page_size, 2, 8).to(dtype)
    bulk, appended = int4_buffers(6, 2, page_size, 8), int4_buffers(6, 2, page_size, 8)
    quantize_int4_pages(k_pool, torch.tensor([4, 2, 1]), *bulk)
    for length in range(36):  # request 1 is seven tokens behind
        append_int4(k_pool, table, torch.tensor([length, max(0, length - 7)]), *appended)
    assert torch.equal(appended[0], bulk[0])
    assert torch.equal(appended[1], bulk[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_copy_of_some_channels_is_one_of_keys_that_have_no_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k_pool, channels = torch.randn(3 * 16, 2, 12), torch.tensor([[1, 4, 5, 11], [0, 2, 3, 9]])
    few = torch.stack([k_pool[:, head, kept] for head, kept in enumerate(channels)], 1)
    k_pool, few = k_pool.to(dtype), few.to(dtype)
    pages, slots, table = torch.tensor([2, 0]), torch.tensor([5, 40]), torch.tensor([[1, 2]])
    for append in (False, True):
        found, want = int4_buffers(3, 2, 16, 4), int4_buffers(3, 2, 16, 4)
        for pool, copy, kept in ((k_pool, found, channels), (few, want, None)):
            if append:
                append_int4(pool, table, torch.tensor([16]), *copy, kept)
            else:
                quantize_int4_pages(pool, pages, *copy, kept)
        assert bool(want[0].any())
        assert all(map(torch.equal, found, want))
    codes, scale = torch.zeros(48, 2, 4, dtype=torch.int8), torch.zeros(48, 2)
    append_int8(k_pool, slots, codes, scale, channels)
    full, full_scale = quantize_int8(few)
    assert torch.equal(codes[slots], full[slots])
    assert torch.equal(scale[slots], full_scale[slots])
    with pytest.raises(ValueError, match="scales"):
        quantize_int4_pages(k_pool, pages, *int4_buffers(3, 2, 16, 4))
    with pytest.raises(ValueError, match="channels"):
        append_int8(k_pool, slots, codes, scale, channels[:1])


def test_append_int8_equals_bulk() -> None:
    k_pool = torch.randn(20, 3, 8).bfloat16()
    codes, scale = torch.full((20, 3, 8), 99, dtype=torch.int8), torch.full((20, 3), 9.0)
    want, want_scale = codes.clone(), scale.clone()
    slots = torch.tensor([3, -1, 19, 0])
    append_int8(k_pool, slots, codes, scale)
    full, full_scale = quantize_int8(k_pool)
    written = [0, 3, 19]
    want[written], want_scale[written] = full[written], full_scale[written]
    assert torch.equal(codes, want)
    assert torch.equal(scale, want_scale)


def test_errors_name_the_argument() -> None:
    k_pool = torch.zeros(64, 2, 8)
    codes, scales = int4_buffers(4, 2, 16, 8)
    with pytest.raises(ValueError, match=r"scales\.shape"):
        quantize_int4_pages(k_pool, torch.arange(2), codes, scales[:, :, :1])
    with pytest.raises(ValueError, match="num_slots=48"):
        quantize_int4_pages(k_pool[:48], torch.arange(2), codes, scales)
    with pytest.raises(ValueError, match=r"codes\.dtype"):
        append_int4(k_pool, torch.zeros(1, 2).int(), torch.zeros(1).int(), codes.char(), scales)
    with pytest.raises(ValueError, match=r"slots\.dtype"):
        append_int8(k_pool, torch.zeros(2), torch.zeros(64, 2, 8).char(), torch.zeros(64, 2))
