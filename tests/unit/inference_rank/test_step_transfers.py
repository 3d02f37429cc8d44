# SPDX-License-Identifier: Apache-2.0
"""The step's transfers must be made in the announced order and size, or not at all."""

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.fake_transport import fake_pair
from tandemkv.cache_rank.protocol.step_program import Direction, Transfer, TransferKind
from tandemkv.inference_rank.step_transfers import StepTransfers


def transfer(
    kind: TransferKind, direction: Direction, layer: int, shape: tuple[int, ...]
) -> Transfer:
    return Transfer(kind=kind, direction=direction, layers=(layer,), shape=shape, dtype="float32")


UP = transfer(TransferKind.HIDDEN, Direction.UP, 0, (2, 3))
DOWN = [transfer(TransferKind.RESTORE, Direction.DOWN, i, (4,)) for i in range(3)]


def test_out_of_order_send_is_refused() -> None:
    ours, _ = fake_pair()
    step = StepTransfers(ours, [UP])
    with pytest.raises(ProtocolError, match="expected"):
        step.send(TransferKind.HIDDEN, (1,), torch.zeros(2, 3))


@pytest.mark.parametrize("tensor", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)])
def test_wrong_size_or_dtype_is_refused(tensor: torch.Tensor) -> None:
    ours, _ = fake_pair()
    step = StepTransfers(ours, [UP])
    with pytest.raises(ProtocolError, match="expected float32"):
        step.send(TransferKind.HIDDEN, (0,), tensor)


def test_receives_are_posted_in_order_and_may_be_consumed_out_of_it() -> None:
    ours, theirs = fake_pair()
    step = StepTransfers(ours, DOWN)
    for i in range(3):
        theirs.issue_send(torch.full((4,), float(i)))
    last = step.receive(TransferKind.RESTORE, (2,))
    last.work.wait(None)
    first = step.receive(TransferKind.RESTORE, (0,))
    first.work.wait(None)
    assert last.buffer.tolist() == [2.0] * 4
    assert first.buffer.tolist() == [0.0] * 4


def test_an_unfinished_step_is_an_error() -> None:
    ours, _ = fake_pair()
    step = StepTransfers(ours, [UP])
    with pytest.raises(ProtocolError, match="1 transfers not made"):
        step.check_complete()
