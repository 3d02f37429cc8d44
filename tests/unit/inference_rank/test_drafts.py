# SPDX-License-Identifier: Apache-2.0
"""Steps that verify drafts: attention along a tree, and what stands for SGLang's CPU kernels."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import attend_by_definition

from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.attention.native import attend_where

QUERY_HEADS, KV_HEADS, WIDTH = 4, 2, 8


def tree(seed: int, count: int) -> tuple[list[int], torch.Tensor]:
    """Parents of random nodes, -1 of the root, and who attends to whom ``[count, count]``."""
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(node) for node in range(1, count))]
    mask = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
    return parents, mask


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_attends_to_what_it_continues(seed: int) -> None:
    """As if its path were the end of a text of its own."""
    before, count = 5, 7
    _, mask = tree(seed, count)
    shape = torch.Generator().manual_seed(seed)
    query = torch.randn(count, QUERY_HEADS, WIDTH, generator=shape)
    keys, values = torch.randn(2, before + count, KV_HEADS, WIDTH, generator=shape)
    whole = F.pad(mask, (before, 0), value=True)
    found = attend_where(query, keys, values, whole, scale=0.3)
    for node in range(count):
        path = torch.cat((torch.arange(before), before + mask[node].nonzero()[:, 0]))
        want = attend_by_definition(
            query[node : node + 1].double(), keys[path].double(), values[path].double(), None,
            scale=0.3, window=None,
        )  # fmt: skip
        torch.testing.assert_close(found[node : node + 1].double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_the_links_of_a_tree_are_those_that_sglang_derives(seed: int) -> None:
    ops = importlib.import_module("sgl_kernel.speculative")
    worker = importlib.import_module("sglang.srt.speculative.ngram_worker")
    count = 8
    trees = [tree(10 * seed + request, count) for request in range(3)]
    masks = torch.stack([mask for _, mask in trees])
    lengths = torch.tensor([5, 11, 2])
    positions = torch.zeros(3 * count, dtype=torch.int64)
    index, child, sibling = torch.zeros(3, 3, count, dtype=torch.int64)
    ops.reconstruct_indices_from_tree_mask(
        masks.flatten(), lengths, positions, index, child, sibling, 3, count
    )
    assert index.flatten().tolist() == list(range(3 * count))
    for request, (parents, _) in enumerate(trees):
        depth = [0] * count
        for node in range(1, count):
            depth[node] = depth[parents[node]] + 1
        want = [int(lengths[request]) + level for level in depth]
        assert positions.view(3, count)[request].tolist() == want
    want_child, want_sibling = worker._derive_tree_links(masks.numpy(), 3, count)
    assert torch.equal(child, want_child)
    assert torch.equal(sibling, want_sibling)


@pytest.mark.parametrize("seed", range(12))
def test_the_path_that_the_model_would_write_is_accepted(seed: int) -> None:
    """Three different tokens, so that many drafts are right; children of a node differ."""
    ops = importlib.import_module("sgl_kernel.speculative")
    rng, count = random.Random(seed), 8
    parents, mask = tree(seed, count)
    drafts = [0] * count
    for node in range(1, count):
        taken = {drafts[other] for other in range(1, node) if parents[other] == parents[node]}
        drafts[node] = rng.choice([t for t in range(10) if t not in taken][:3])
    wanted = [rng.randrange(3) for _ in range(count)]
    path = [0]
    while True:
        after = [
            n for n in range(1, count) if parents[n] == path[-1] and drafts[n] == wanted[path[-1]]
        ]
        if not after:
            break
        path.append(after[0])
    positions = torch.zeros(count, dtype=torch.int64)
    links = torch.zeros(3, 1, count, dtype=torch.int64)
    ops.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor([4]), positions, *links, 1, count
    )
    predicts = torch.zeros(count, dtype=torch.int32)
    accepted = torch.full((1, count), -1, dtype=torch.int32)
    number = torch.zeros(1, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts, accepted, number, torch.tensor([drafts]), *links, torch.tensor([wanted])
    )
    assert accepted[0].tolist() == path + [-1] * (count - len(path))
    assert number.tolist() == [len(path) - 1]
    assert [int(predicts[node]) for node in path] == [wanted[node] for node in path]

    slots = torch.arange(100, 100 + count)
    found = torch.zeros(count, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(accepted, slots, found)
    assert found.tolist() == [100 + node for node in path] + [0] * (count - len(path))


def test_slots_of_drafts_are_read_from_the_request_table() -> None:
    ops = importlib.import_module("sgl_kernel.speculative")
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = torch.full((7,), -5)
    ops.assign_extend_cache_locs_cpu(
        torch.tensor([2, 0]), table, torch.tensor([3, 8]), torch.tensor([7, 10]), found, 10
    )
    assert found.tolist() == [23, 24, 25, 26, 8, 9, -5]


def test_rows_of_accepted_drafts_are_moved_in_all_buffers() -> None:
    ops = importlib.import_module("sgl_kernel.speculative")
    buffers = [torch.randn(9, 2, 4), torch.randn(9, 2, 3).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    targets, sources = torch.tensor([3, 4, 5]), torch.tensor([4, 7, 3])
    ops.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        targets, sources,
    )  # fmt: skip
    for old, found in zip(before, buffers, strict=True):
        want = old.clone()
        want[targets] = old[sources]
        assert torch.equal(found, want)


class Full:
    """SGLang's own backend, by what it is asked for."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def init_forward_metadata(self, batch: Any) -> None:
        self.seen.append("eager")

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool) -> None:
        self.seen.append(("graph", in_capture))

    def forward_extend(self, q: Any, *_: Any, **__: Any) -> Any:
        return q


def test_a_step_that_verifies_is_sglangs_alone() -> None:
    """Neither the engine nor resident sets are asked; captured steps are not counted."""
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    backend: Any = ResidentBackend.__new__(ResidentBackend)
    counters = SimpleNamespace(decode_steps_total=0, exact_rows_total=0)
    backend._full, backend._runtime = Full(), SimpleNamespace(counters=counters)
    backend._fence = SimpleNamespace(planning=torch.no_grad)
    batch = SimpleNamespace(forward_mode=modes.TARGET_VERIFY, batch_size=2)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata(batch)
    batch.num_padding = 1
    backend.init_forward_metadata_out_graph(batch)
    assert backend._full.seen == [("graph", True), "eager", ("graph", False)]
    assert (counters.decode_steps_total, counters.exact_rows_total) == (2, 3)
    assert backend.forward_extend("query", None, None, None, batch) == "query"
