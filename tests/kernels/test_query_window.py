# SPDX-License-Identifier: Apache-2.0
"""Queries predicted from windows: against RoPE undone and done again."""

import in_float64
import pytest
import torch
from tolerances import Tolerance, assert_close

from tandemkv.kernels.query_window import push_and_predict, ridge_predict

HEADS, DIM = 2, 16


def make(num_rows: int = 3, size: int = 4) -> dict[str, torch.Tensor]:
    return {
        "windows": torch.full((num_rows, size + 2, HEADS, DIM), float("nan")),
        "starts": torch.tensor([1 << 62, 9, 40][:num_rows]),
    }


@pytest.mark.parametrize("prediction", ["ridge", "mean"])
@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("scaling", [1.0, 1.2])
def test_relative_rotation_is_to_unrotate_and_rotate(
    prediction: str, lag: int, scaling: float
) -> None:
    torch.manual_seed(0)
    size, inv_freq = 4, 1.0 / 100.0 ** (torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(lag + torch.arange(size + 1), inv_freq.double())
    tables = {"cos": angles.cos().float(), "sin": angles.sin().float()}
    state, plain = make(size=size), torch.randn(12, 2, HEADS, DIM)
    rows, first = torch.tensor([2, 1]), torch.tensor([40, 9])
    for step, query in enumerate(plain):
        positions = first + step
        got = push_and_predict(
            in_float64.rotated(query, positions, inv_freq, scaling).float(),
            rows, positions, **state, prediction=prediction, eps=0.05, **tables,
        )  # fmt: skip
        count = min(step + 1, size + 1)
        window = plain[: step + 1][-count:].double().permute(1, 2, 0, 3)
        if prediction == "mean":
            want = window.mean(-2)
        elif count == 1:
            want = window[..., 0, :]
        else:
            counts = torch.full((2, HEADS), count)
            want = ridge_predict(window, counts, eps=0.05, sign=1, normalise="softmax")
        want = in_float64.rotated(want, positions + lag, inv_freq, scaling)
        assert_close(got, want, Tolerance(abs_error=1e-4, rel_error=1e-4, cosine_gap=1e-8))


def test_a_window_starts_over_where_it_is_told_to() -> None:
    torch.manual_seed(1)
    state, row = make(), torch.tensor([1])
    for position in range(9, 20):
        push_and_predict(
            torch.randn(1, HEADS, DIM), row, torch.tensor([position]), **state, prediction="mean"
        )
    state["starts"][1] = 20
    query = torch.randn(1, HEADS, DIM)
    got = push_and_predict(query, row, torch.tensor([20]), **state, prediction="mean")
    assert torch.equal(got, query)


@pytest.mark.parametrize("prediction", ["ridge", "mean"])
def test_two_steps_that_are_done_again_predict_the_same(prediction: str) -> None:
    """After a loss: the second step's query must not be in place of one that the first reads."""
    torch.manual_seed(3)
    state, row = make(), torch.tensor([1])
    queries = torch.randn(12, 1, HEADS, DIM)

    def step(number: int) -> torch.Tensor:
        position = torch.tensor([9 + number])
        return push_and_predict(queries[number], row, position, **state, prediction=prediction)

    want = [step(number) for number in range(12)][-2:]
    assert all(torch.equal(step(10 + i), want[i]) for i in range(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction": "median"}, "prediction='median'"),
        ({"windows": torch.zeros(3, 19, HEADS, DIM)}, "<= 16"),
        ({"windows": torch.zeros(3, 2, HEADS, DIM)}, ">= 1"),
        ({"cos": torch.ones(5, DIM // 2)}, "together with cos"),
        ({"sign": 2}, "sign=2"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"normalise": "l2"}, "normalise='l2'"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "num_reqs=1"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments = {
        "query": torch.zeros(1, HEADS, DIM),
        "rows": torch.tensor([1]),
        "positions": torch.tensor([9]),
        **make(),
        "prediction": "ridge",
        **change,
    }
    with pytest.raises(ValueError, match=message):
        push_and_predict(**arguments)


@pytest.mark.gpu
def test_a_replayed_graph_follows_rows_and_positions() -> None:
    torch.manual_seed(2)
    state = {name: tensor.cuda().nan_to_num() for name, tensor in make().items()}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    query = torch.randn(2, HEADS, DIM, device="cuda")
    rows = torch.zeros(2, dtype=torch.int64, device="cuda")  # padding, as when SGLang captures
    positions = torch.zeros(2, dtype=torch.int64, device="cuda")
    push_and_predict(query, rows, positions, **state, prediction="ridge")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = push_and_predict(query, rows, positions, **state, prediction="ridge")
    rows.copy_(torch.tensor([2, 1]))
    for step in range(7):
        query.normal_()
        positions.copy_(torch.tensor([40 + step, 9 + step]))
        graph.replay()
        now = query.cpu(), rows.cpu(), positions.cpu()
        want = push_and_predict(*now, **expected, prediction="ridge")
        assert_close(got, want, Tolerance(abs_error=3e-4, rel_error=3e-4, cosine_gap=1e-7))
