# SPDX-License-Identifier: Apache-2.0
"""Run the cases about scores (`own_process`), and graphs."""

from pathlib import Path

import pytest
import torch
from own_process import SCORES, run_cases
from score_inputs import KINDS, ON_GPU, expected, magnitude, make_keys, scan_of
from tolerances import assert_close

from tandemkv.kernels.quantize import append_int4, append_int8, quantize_int4_pages
from tandemkv.kernels.score import POOLINGS, make_score_scratch, score_keys, score_window

pytest.importorskip("triton")


@pytest.mark.timeout(900)  # interpreted, minutes on a busy core
def test_triton_scores_equal_float64(tmp_path: Path) -> None:
    run_cases(*SCORES, cache_dir=tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_graph_replays_with_other_lengths(kind: str, pooling: str) -> None:
    keys = make_keys(
        kind, num_reqs=3, heads=8, group=4, dim=128, page_size=64, num_pages=300, device="cuda"
    )
    width, scale = 6400, 128**-0.5
    lo, hi = torch.zeros(3, dtype=torch.int32, device="cuda"), torch.zeros_like(keys.table[:, 0])
    out = torch.zeros(3, 8, width, device="cuda")
    scratch = make_score_scratch(3, 32, 8, width, out.device)
    scan = scan_of(keys, lo, hi, width=width, scale=scale, pooling=pooling)

    def run() -> None:
        score_keys(scan, out=out, scratch=scratch)

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for first, last in (([4, 4, 4], [6400, 70, 3]), ([0, 65, 9], [1, 3000, 6399])):
        lo.copy_(torch.tensor(first))
        hi.copy_(torch.tensor(last))
        out.fill_(float("nan"))
        graph.replay()
        for req, (begin, end) in enumerate(zip(first, last, strict=True)):
            if begin < end:
                want = expected(keys, req, begin, end, pooling, scale)
                got = out[req, :, begin:end]
                largest = magnitude(keys, req, begin, end, pooling, scale)
                assert_close(got / largest, want / largest, ON_GPU)


@pytest.mark.gpu
def test_appends_replay_and_the_window_never_waits() -> None:
    k_pool = torch.randn(640, 4, 64, device="cuda").bfloat16()
    table = torch.randperm(10, device="cuda").int().view(2, 5)
    lengths, slots = torch.tensor([64, 65]).cuda(), torch.tensor([5, 9]).cuda()
    codes = torch.zeros(10, 4, 64, 32, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(10, 4, 2, 64, dtype=torch.float16, device="cuda")
    codes8 = torch.zeros(640, 4, 64, dtype=torch.int8, device="cuda")
    scale8 = torch.zeros(640, 4, device="cuda")

    def run() -> torch.Tensor:
        append_int4(k_pool, table, lengths, codes, scales)
        append_int8(k_pool, slots, codes8, scale8)
        q_positions = torch.arange(290, 298, device="cuda")
        return score_window(
            k_pool[:8].repeat(1, 2, 1), codes, table[0], 4, 290, q_positions, scale=0.1,
            k_scale=scales, page_size=64,
        )  # fmt: skip

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a host sync would break the capture
        run()
    codes.zero_()
    lengths.copy_(torch.tensor([100, 320]))
    graph.replay()
    want, want_scales = torch.zeros_like(codes), torch.zeros_like(scales)
    quantize_int4_pages(k_pool, table[1, 4:], want, want_scales)
    assert torch.equal(codes, want)
    assert (scale8 > 0).any(dim=1).nonzero()[:, 0].tolist() == [5, 9]


@pytest.mark.gpu
def test_other_lengths_compile_no_window_again() -> None:
    from tandemkv.kernels.triton_ops import score_window_kernels

    keys = make_keys(
        "int4", num_reqs=1, heads=8, group=4, dim=128, page_size=64, num_pages=80, device="cuda"
    )
    q_window = torch.randn(16, 32, 128, device="cuda").bfloat16()

    def num_compiled(hi: int) -> int:
        positions = torch.arange(hi, hi + 16, device="cuda")
        score_window(
            q_window, keys.k_pool, keys.table[0], 4, hi, positions, scale=0.1,
            k_scale=keys.k_scale, page_size=64,
        )  # fmt: skip
        kernels = (score_window_kernels.lse_kernel, score_window_kernels.weigh_kernel)
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    first = num_compiled(2048)
    assert first >= 2
    assert [num_compiled(hi) for hi in (33, 64, 100, 999, 1024, 5120)] == [first] * 6
