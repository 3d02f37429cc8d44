# SPDX-License-Identifier: Apache-2.0
"""A process group of one process that opens no socket, in place of gloo's.

SGLang makes a gloo group for each kind of parallelism, also where a group has one member. gloo
listens on TCP as soon as a group is made, and each connection to it, even if it is closed at once,
keeps a file descriptor until the process ends. A group of one process has nobody to talk to:
a collective over it copies the input to the output, or leaves the tensor as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch._C import _distributed_c10d

NAME = "single_process"
_GLOO = "gloo"

# Their stubs know nothing of process groups written in Python.
_dist: Any = torch.distributed
_c10d: Any = _distributed_c10d
_Tensors = Sequence[torch.Tensor]


class SingleProcessGroup(_dist.ProcessGroup):
    """Collectives over one process; done when they return.

    The names and signatures are those that torch calls; torch 2.11, which SGLang pins on GPUs,
    calls some of them ``_allgather_base`` and the like. Sending and receiving are left out: they
    raise, as for any backend that lacks them.
    """

    def __init__(self, rank: int, size: int) -> None:
        if (rank, size) != (0, 1):
            raise ValueError(
                f"rank={rank}, size={size}: the backend {NAME} is for groups of one process; use "
                "gloo or nccl for larger ones"
            )
        super().__init__(rank, size)

    def getBackendName(self) -> str:
        """Name for torch's logs and errors."""
        return NAME

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Leave `tensors`: the sum over one process is its own value."""
        return _done(tensors)

    allreduce_coalesced = allreduce
    broadcast = allreduce
    reduce = allreduce

    def barrier(self, opts: Any = None) -> Any:
        """Nobody has to be waited for."""
        return _done([])

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Copy each input to the one output of its list."""
        return _copy([out for (out,) in outputs], inputs)

    gather = allgather

    def allgather_coalesced(
        self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> Any:
        """Copy the inputs to the outputs of the one process."""
        (own,) = outputs
        return _copy(own, inputs)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Copy the one input of each list to its output."""
        return _copy(outputs, [tensor for (tensor,) in inputs])

    reduce_scatter = scatter

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Copy the inputs to the outputs."""
        return _copy(outputs, inputs)

    all_gather_single_coalesced = alltoall
    reduce_scatter_single_coalesced = alltoall
    allgather_into_tensor_coalesced = alltoall
    reduce_scatter_tensor_coalesced = alltoall

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Any:
        """Copy the input to the output, which has as many elements."""
        return _copy([output], [source.view(output.shape)])

    reduce_scatter_single = all_gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = all_gather_single

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, _output_splits: Any = None,
        _input_splits: Any = None, opts: Any = None,
    ) -> Any:  # fmt: skip
        """Copy the input to the output."""
        return _copy([output], [source])

    alltoall_base = all_to_all_single


def register() -> None:
    """Make the backend known to torch. Calling it again does nothing."""
    if NAME not in _dist.Backend.backend_list:
        _dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def without_listener(backend: str, size: int | None) -> str:
    """Return the backend to use instead of `backend` for a group of `size` processes, if known."""
    if size != 1 or str(backend).lower() != _GLOO:
        return backend
    register()
    return NAME


def around_new_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace gloo in ``torch.distributed.new_group`` for groups of one process.

    Only calls that name the backend gloo as a keyword are changed, as SGLang's do; a group without
    a backend has that of the group of all processes.
    """
    ranks = args[0] if args else kwargs.get("ranks")
    size = _dist.get_world_size() if ranks is None else len(ranks)
    if kwargs.get("backend") is not None:
        kwargs["backend"] = without_listener(kwargs["backend"], size)
    return original(*args, **kwargs)


def around_monitored_barrier(
    original: Callable[..., Any], group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Answer ``torch.distributed.monitored_barrier``, which torch allows for gloo alone."""
    if isinstance(_dist.group.WORLD if group is None else group, SingleProcessGroup):
        return None
    return original(group, *args, **kwargs)


def _create(_store: Any, rank: int, size: int, _timeout: Any) -> SingleProcessGroup:
    return SingleProcessGroup(rank, size)


def _copy(outputs: _Tensors, inputs: _Tensors) -> Any:
    for output, source in zip(outputs, inputs, strict=True):
        output.copy_(source)
    return _done(outputs)


def _done(tensors: _Tensors) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    return _c10d._create_work_from_future(future)
