# SPDX-License-Identifier: Apache-2.0
"""Prefixes that are copied ahead of a prefill's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from flashinfer_without_a_gpu import HEADS, LAYERS, WIDTH, Serving, stand_in
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.inference_rank.attention import prefix_staging
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.attention.graph_variants import PlanFence
from tandemkv.inference_rank.attention.prefix_staging import PrefixStaging
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.start import local
from tandemkv.kernels.streams import LOWEST_PRIORITY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def pair(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Serving, Serving, Counters]:
    """Return one that reads its pool and one that copies, and the counters of that."""
    near, far, counters = Serving(dtype), Serving(dtype), Counters()
    far.staging = PrefixStaging(far.full, far.pool, num_tokens, CPU, counters)
    return near, far, counters


PASSES = (
    ((0, 0, 11),),
    ((0, 11, 19),),
    ((0, 19, 24), (1, 0, 9)),
    ((1, 9, 14), (0, 24, 31)),
)
"""Chunks of two prompts: a prefix of 19 tokens is the longest alone, 33 tokens are most in all."""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not bool(torch.isnan(a).any()) and torch.equal(a, b)


@pytest.mark.parametrize("num_tokens", [40, 17])  # two buffers, and one of both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_outputs_are_those_of_reading_the_pool(num_tokens: int, dtype: torch.dtype) -> None:
    near, far, counters = pair(num_tokens, dtype)
    for chunks in PASSES:
        want, found = near.prefill(*chunks), far.prefill(*chunks)
        assert same(found, want), chunks
        assert far.pool.num_reads == LAYERS, "only the first pass, which has no prefix"
    assert counters.copied_prefix_tokens_total == 11 + 19 + (9 + 24)
    assert counters.far_prefix_passes_total == 0
    for ours, theirs in zip(far.pool.k_buffer, near.pool.k_buffer, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_what_requests_share_is_copied_once() -> None:
    """Prefixes of 9 and 24 tokens, where 24 fit: 6 in both are too few, all 9 are enough."""
    near, far, counters = pair(12)
    for serving in (near, far):
        serving.table[1, :6] = serving.table[0, :6]
        serving.prefill((0, 0, 24))
        serving.prefill((1, 6, 9))
    chunks = PASSES[-1]
    assert same(far.prefill(*chunks), near.prefill(*chunks))
    assert counters.far_prefix_passes_total == 1
    for serving in (near, far):
        serving.table[1, 6:9] = serving.table[0, 6:9]
    assert same(far.prefill(*chunks), near.prefill(*chunks))
    assert counters.far_prefix_passes_total == 1
    assert counters.copied_prefix_tokens_total == 6 + 24


def test_prefixes_that_do_not_fit_are_read_from_the_pool_and_counted() -> None:
    near, far, counters = pair(5)
    for chunks in PASSES:
        assert same(far.prefill(*chunks), near.prefill(*chunks))
    assert counters.far_prefix_passes_total == 3
    assert counters.copied_prefix_tokens_total == 0
    assert far.pool.num_reads == len(PASSES) * LAYERS


def test_new_tokens_that_are_read_from_the_pool_are_read_there() -> None:
    near, far, counters = pair(WIDTH)
    for serving in (near, far):
        serving.full.enable_deterministic = True
    for chunks in PASSES:
        assert same(far.prefill(*chunks), near.prefill(*chunks))
    assert counters.far_prefix_passes_total == 3


def test_a_pass_after_one_that_failed() -> None:
    near, far, _ = pair(WIDTH)
    for serving in (near, far):
        serving.prefill((0, 0, 11))
    with pytest.raises(RuntimeError, match="the pass fails"):
        far.prefill((0, 11, 19), fails_at=2)
    far.pool.num_reads = 0
    for chunks in (((1, 0, 9),), ((0, 11, 19),)):
        assert same(far.prefill(*chunks), near.prefill(*chunks))
    assert far.pool.num_reads == LAYERS, "the first of them has no prefix"
    far.staging.get_kv_buffer(0)
    assert far.pool.num_reads == LAYERS + 1, "outside of a pass it is the pool"


def test_a_backend_that_goes_past_the_staging_is_refused() -> None:
    _, far, _ = pair(WIDTH)
    far.full.token_to_kv_pool = far.pool
    far.prefill((0, 0, 11))
    with pytest.raises(ContractError, match="layer 0: SGLang has read"):
        far.prefill((0, 11, 19))


class Beside:
    """Notes in which order a side stream is used, by layers."""

    seen: ClassVar[list[str]] = []

    def __init__(self, _device: torch.device, _num_layers: int, *, priority: int) -> None:
        assert priority == LOWEST_PRIORITY

    @contextmanager
    def fork(self, *_reads: torch.Tensor) -> Iterator[None]:
        self.seen.append("behind all")
        yield

    def note_done(self, layer: int) -> None:
        self.seen[-1] = f"copy {layer}"

    def join(self, layer: int) -> None:
        self.seen.append(f"wait for {layer}")

    def join_all(self) -> None:
        self.seen.append("wait")


@pytest.mark.parametrize(
    ("num_tokens", "order"),
    [
        (11, "wait, copy 0, copy 1, wait for 0, attend 0, copy 2, wait for 1, attend 1, copy 3"),
        (6, "wait, copy 0, wait for 0, attend 0, copy 1, wait for 1, attend 1, copy 2"),
    ],
)
def test_a_layer_is_copied_behind_the_attention_that_it_is_copied_over(
    num_tokens: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_staging, "SideStream", Beside)
    monkeypatch.setattr(Beside, "seen", [])
    _, serving, _ = pair(num_tokens)
    attend = serving.full.forward_extend

    def forward_extend(q: Any, k: Any, v: Any, layer: Any, batch: Any) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, v, layer, batch)
        Beside.seen.append(f"attend {layer.layer_id}")
        return out

    serving.full.forward_extend = forward_extend
    serving.prefill((0, 0, 11))
    assert Beside.seen == ["wait", *(f"attend {i}" for i in range(LAYERS))], "without a prefix"
    Beside.seen.clear()
    serving.prefill((0, 11, 19))
    assert ", ".join(Beside.seen).startswith(order)
    assert Beside.seen[-2:] == [f"wait for {LAYERS - 1}", f"attend {LAYERS - 1}"]


def test_a_pass_is_copied_once_it_is_planned_and_layers_once_they_have_attended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Beside, "seen", [])
    seen, out = Beside.seen, torch.zeros(1)
    backend: Any = object.__new__(ResidentBackend)
    backend.__dict__.update(
        _full=SimpleNamespace(
            init_forward_metadata=lambda _batch: seen.append("plan"),
            forward_extend=lambda *_: (seen.append("attend"), out)[1],
        ),
        _staging=SimpleNamespace(
            begin=lambda prefixes: seen.append(f"copy {prefixes}"),
            attended=lambda layer: seen.append(f"attended {layer}"),
        ),
        _fence=PlanFence(CPU), _begin_extend=lambda _batch: seen.append("announce"),
        _index_and_seed=lambda *_: None, _after=lambda _layer, found: found, _windows=[],
    )  # fmt: skip
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_prefix_lens_cpu=[3, 0])
    backend.init_forward_metadata(batch)
    layer = SimpleNamespace(layer_id=4, tp_q_head_num=1, head_dim=1)
    assert backend.forward_extend(out, out, out, layer, batch) is out
    assert seen == ["plan", "copy [3, 0]", "announce", "attend", "attended 4"]


@pytest.mark.parametrize(
    ("link", "two_gpus", "device", "is_copied"),
    [
        ("shared", True, "cuda:0", True),
        ("shared", False, "cuda:0", False),
        ("shared", True, "cpu", False),  # laid out as for two GPUs
        ("message", True, "cuda:0", False),
        ("local", False, "cuda:0", False),
    ],
)
def test_prefixes_are_copied_from_another_gpu_alone(
    link: str, two_gpus: bool, device: str, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PrefixStaging", lambda *given: given)
    settings = SimpleNamespace(placement=Placement(link=link, two_gpus=two_gpus))
    runtime: Any = SimpleNamespace(settings=settings, counters=Counters())
    for num_slots, longest in ((900, 900), (2000, 1024)):
        runner = SimpleNamespace(
            device=device, token_to_kv_pool=SimpleNamespace(size=num_slots - 128, page_size=128),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(9, 1024)),
        )  # fmt: skip
        found = local.prefix_staging(runner, runtime, "full")
        wanted = ("full", runner.token_to_kv_pool, longest, torch.device(device), runtime.counters)
        assert found == (wanted if is_copied else None)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [30_000, 12_000])
def test_copies_beside_a_forward_pass(num_tokens: int) -> None:
    """One stream or the other is late at each layer."""
    device, size = torch.device("cuda", 0), 20_000
    kv = torch.randn(2, 8, 40_000, HEADS, 64, device=device).bfloat16()
    pool = SimpleNamespace(dtype=kv.dtype, k_buffer=list(kv[0]), v_buffer=list(kv[1]))
    wrapper = SimpleNamespace()
    plan = SimpleNamespace(use_ragged=True, prefill_wrappers=[wrapper])
    full = SimpleNamespace(forward_metadata=plan)
    staging = PrefixStaging(full, pool, num_tokens, device, Counters())
    for turn in range(4):
        slots = torch.randperm(40_000, device=device)[:size]
        wrapper._paged_kv_indices_buf = torch.cat([slots.int(), slots.new_zeros(256).int()])
        staging.begin([size])
        places, found = wrapper._paged_kv_indices_buf[:size].long(), []
        for layer in range(8):
            if (layer + turn) % 2:
                torch.cuda._sleep(5_000_000)
            else:
                with staging._side.fork():
                    torch.cuda._sleep(5_000_000)
            found.append([part[places] for part in staging.get_kv_buffer(layer)])
            staging.attended(layer)
        for layer, parts in enumerate(found):
            for part, far in zip(parts, kv, strict=True):
                assert torch.equal(part, far[layer, slots]), f"turn {turn}, layer {layer}"
