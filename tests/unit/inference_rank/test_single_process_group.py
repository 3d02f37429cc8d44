# SPDX-License-Identifier: Apache-2.0
"""The group of one process gives gloo's results, and opens no socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tandemkv.inference_rank.sglang import single_process_group
from tandemkv.inference_rank.sglang.single_process_group import NAME, SingleProcessGroup

_ROWS = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """All processes: this one."""
    backend = single_process_group.without_listener("gloo", 1)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new_group(backend: str) -> Any:
    """Make a group as SGLang does, through the hook."""
    return single_process_group.around_new_group(dist.new_group, [0], backend=backend)


def all_reduce(group: Any) -> list[torch.Tensor]:
    tensor = _ROWS.clone()
    dist.all_reduce(tensor, group=group)
    return [tensor]


def broadcast(group: Any) -> list[torch.Tensor]:
    tensor = _ROWS.clone()
    dist.broadcast(tensor, src=0, group=group)
    return [tensor]


def reduce(group: Any) -> list[torch.Tensor]:
    tensor = _ROWS.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.MAX, group=group)
    return [tensor]


def all_gather(group: Any) -> list[torch.Tensor]:
    found = [torch.zeros(2, 3)]
    dist.all_gather(found, _ROWS, group=group)
    return found


def all_gather_into_tensor(group: Any) -> list[torch.Tensor]:
    found = torch.zeros(2, 3)
    dist.all_gather_into_tensor(found, _ROWS, group=group)
    return [found]


def gather(group: Any) -> list[torch.Tensor]:
    found = [torch.zeros(2, 3)]
    dist.gather(_ROWS, found, dst=0, group=group)
    return found


def scatter(group: Any) -> list[torch.Tensor]:
    found = torch.zeros(2, 3)
    dist.scatter(found, [_ROWS], src=0, group=group)
    return [found]


def reduce_scatter(group: Any) -> list[torch.Tensor]:
    found = torch.zeros(2, 3)
    dist.reduce_scatter(found, [_ROWS], group=group)
    return [found]


def reduce_scatter_tensor(group: Any) -> list[torch.Tensor]:
    found = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(found, _ROWS, group=group)
    return [found]


def all_to_all_single(group: Any) -> list[torch.Tensor]:
    found = torch.zeros(2, 3)
    dist.all_to_all_single(found, _ROWS, group=group)
    return [found]


def objects(group: Any) -> list[torch.Tensor]:
    """Objects travel as tensors; these ones are numbers."""
    sent: list[Any] = [7]
    dist.broadcast_object_list(sent, src=0, group=group)
    found: list[Any] = [None]
    dist.all_gather_object(found, 5, group=group)
    return [torch.tensor([*sent, *found])]


def barriers(group: Any) -> list[torch.Tensor]:
    dist.barrier(group=group)
    single_process_group.around_monitored_barrier(
        dist.monitored_barrier, group=group, wait_all_ranks=True
    )
    return []


@pytest.mark.parametrize(
    "collective",
    [
        all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, gather, scatter,
        reduce_scatter, reduce_scatter_tensor, all_to_all_single, objects, barriers,
    ],
)  # fmt: skip
def test_gives_the_results_of_gloo(
    world: None, collective: Callable[[Any], list[torch.Tensor]]
) -> None:
    alone, gloo = new_group("gloo"), dist.new_group([0], backend="gloo")
    assert isinstance(alone, SingleProcessGroup)
    assert not isinstance(gloo, SingleProcessGroup)
    for mine, want in zip(collective(alone), collective(gloo), strict=True):
        assert torch.equal(mine, want)


def test_opens_no_socket(world: None) -> None:
    def listeners() -> int:
        connections = psutil.Process().net_connections("tcp")
        return sum(found.status == psutil.CONN_LISTEN for found in connections)

    before = listeners()
    group = new_group("gloo")
    assert (dist.get_backend(group), dist.get_world_size(group)) == (NAME, 1)
    assert listeners() == before
    dist.new_group([0], backend="gloo")
    assert listeners() == before + 1  # else this test would not see one


def test_names_of_torch_2_11(world: None) -> None:
    """SGLang's own pin calls these; torch 2.13 has other names."""
    group, found = new_group("gloo"), torch.zeros(2, 3)
    for name in ("_allgather_base", "_reduce_scatter_base"):
        getattr(group, name)(found.zero_(), _ROWS, None).wait()
        assert torch.equal(found, _ROWS)
    group.alltoall_base(found.zero_(), _ROWS, [], [], None).wait()
    assert torch.equal(found, _ROWS)


def test_leaves_other_groups_alone() -> None:
    assert single_process_group.without_listener("gloo", 2) == "gloo"
    assert single_process_group.without_listener("nccl", 1) == "nccl"

    def original(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    around = single_process_group.around_new_group
    assert around(original, [0, 1], backend="gloo") == (([0, 1],), {"backend": "gloo"})
    assert around(original, ranks=[0], backend="nccl")[1]["backend"] == "nccl"
    assert around(original, ranks=[0], backend="gloo")[1]["backend"] == NAME


def test_refuses_more_than_one_process() -> None:
    with pytest.raises(ValueError, match=r"rank=1, size=2: .*groups of one process"):
        SingleProcessGroup(1, 2)
