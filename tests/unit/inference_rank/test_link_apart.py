# SPDX-License-Identifier: Apache-2.0
"""Link ``shared`` where the K/V lie on another GPU: what is sent beside, and exact layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.links.base import DecodeRows, StepLostError
from tandemkv.inference_rank.links.shared import SharedLink

LAYERS, HEADS, DIM = 3, 2, 4
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=LAYERS, num_qo_heads=HEADS, num_kv_heads=1,
    head_dim=DIM, hidden_size=8, max_context=64, dtype="float32", model_hash="0",
)  # fmt: skip


class Signals:
    """Notes what is asked of it, in order."""

    is_captured = False

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.is_answered = True

    def begin(self, *_: object) -> bool:
        return True

    def await_output(self, layer: int, size: int) -> bool:
        self.asked.append(("await_output", layer, size))
        return self.is_answered

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.asked.append((name, given[0] if given else None))


class Layer(torch.nn.Module):
    """A decoder layer; SGLang may have fused its norm with something else."""

    def __init__(self, *, calls_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.Identity()
        self.calls_norm = calls_norm

    def forward(self, positions: object, hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
        return self.input_layernorm(hidden_states) if self.calls_norm else hidden_states


def link_of(
    policy: str, *, two_gpus: bool, exact: list[int], pool: Any = None
) -> tuple[SharedLink, Signals]:
    values = {
        "policy": policy, "budget_tokens": 100, "exact_layers": exact, "index_dtype": "int8"
    }  # fmt: skip
    settings = RankSettings.model_validate(
        {
            "selection": selection_values(values),
            "placement": {"link": "shared", "two_gpus": two_gpus},
        }
    )
    program = EngineProgram(MODEL, settings, page_size=1)
    connection = SimpleNamespace(
        program=program, step=0, epoch=1, lost_reason=None,
        handed_over=lambda _, size: torch.arange(size * HEADS * DIM).view(size, HEADS, DIM).float(),
    )  # fmt: skip
    signals = Signals()
    link = SharedLink(
        connection, signals, generation_of=lambda row: row, rows_on_host=lambda: None,
        pool=pool,
    )  # type: ignore[arg-type]  # fmt: skip
    return link, signals


def begin(link: SharedLink, kind: DecodeKind = DecodeKind.SELECTING) -> None:
    rows, lengths = torch.tensor([1, 2]), torch.tensor([50, 60])
    step = DecodeRows(
        rows=rows, lengths=lengths, lengths_on_host=lengths, req_to_token=rows, num_cold=0
    )
    link.begin_decode(kind, step)


def model_of(*, calls_norm: bool = True) -> Any:
    layers = torch.nn.ModuleList([Layer(calls_norm=calls_norm) for _ in range(LAYERS)])
    model = type("LlamaForCausalLM", (), {})()  # classes of SGLang have architectures' names
    model.model = SimpleNamespace(layers=layers)
    return model


@pytest.mark.parametrize("two_gpus", [False, True])
def test_a_stream_is_sent_behind_the_norm_and_joined_before_attention(two_gpus: bool) -> None:
    link, signals = link_of("look_ahead", two_gpus=two_gpus, exact=[])
    model = model_of()
    link.hook(model)
    begin(link)
    for index, layer in enumerate(model.model.layers[:2]):
        layer(None, torch.ones(2, 8), None, None)
        link.enter_attention(index)
    sent = [(("put_stream", index), ("join_sent", None)) for index in range(2)]
    assert signals.asked == [*sent[0], *sent[1]]


def test_a_part_of_a_batch_is_not_sent() -> None:
    link, signals = link_of("look_ahead", two_gpus=True, exact=[])
    model = model_of()
    link.hook(model)
    begin(link)
    with pytest.raises(ContractError, match="layer 0: SGLang gave it 1 of the 2 requests"):
        model.model.layers[0](None, torch.ones(1, 8), None, None)
    assert signals.asked == []


def test_a_norm_that_was_not_called_is_told_and_forgotten_with_its_step() -> None:
    link, _ = link_of("look_ahead", two_gpus=True, exact=[])
    model = model_of(calls_norm=False)
    link.hook(model)
    begin(link)
    with pytest.raises(ContractError, match=r"layer 0: .*input_layernorm"):
        model.model.layers[0](None, torch.ones(2, 8), None, None)
    begin(link)
    link.enter_attention(0)


class Pool:
    """SGLang's pool: notes what is stored."""

    def __init__(self) -> None:
        self.stored: list[Any] = []

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.stored.append((layer.layer_id, location, k.shape, v.shape))


def test_an_exact_layer_stores_its_token_then_asks_and_takes_its_output() -> None:
    pool = Pool()
    link, signals = link_of("look_ahead", two_gpus=True, exact=[1], pool=pool)
    begin(link)
    owner = SimpleNamespace(layer_id=1, tp_k_head_num=1, head_dim=DIM)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([5, 6]))
    query, token = torch.randn(2, HEADS, DIM), torch.randn(2, DIM)
    link.select_with_query(1, query, token, token, owner, batch, True)
    assert [(layer, k, v) for layer, _, k, v in pool.stored] == [(1, (2, 1, DIM), (2, 1, DIM))]
    assert signals.asked == [("put_query", 1)]
    output = link.remote_output(1)
    assert output is not None
    assert output.tolist() == torch.arange(2 * HEADS * DIM).view(2, -1).tolist()
    assert signals.asked[-1] == ("await_output", 1, 2)
    assert link.remote_output(0) is None
    signals.is_answered = False
    with pytest.raises(StepLostError):
        link.remote_output(1)
    assert link.is_void


def test_a_slow_step_hands_its_query_over_once_and_before_it_attends() -> None:
    pool, query, token = Pool(), torch.randn(2, HEADS, DIM), torch.randn(2, DIM)
    link, signals = link_of("sfi", two_gpus=True, exact=[], pool=pool)
    owner = SimpleNamespace(layer_id=1, tp_k_head_num=1, head_dim=DIM)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([5, 6]))
    for kind in (DecodeKind.SELECTING, DecodeKind.INDEXING):
        begin(link, kind)
        signals.asked.clear()
        link.select_with_query(1, query, token, token, owner, batch, True)
        output = link.remote_output(1)
        link.attended(1, query, 2)
        is_slow = kind is DecodeKind.SELECTING
        assert (output is not None) is is_slow
        assert signals.asked == ([("put_query", 1), ("await_output", 1, 2)] if is_slow else [])
    assert len(pool.stored) == 1


def test_on_one_device_an_exact_layer_is_the_forward_passs_own() -> None:
    link, signals = link_of("look_ahead", two_gpus=False, exact=[1])
    begin(link)
    nothing = torch.empty(0)
    link.select_with_query(1, torch.randn(2, HEADS, DIM), nothing, nothing, None, None, True)
    assert link.remote_output(1) is None
    assert signals.asked == []


@pytest.mark.parametrize(
    ("two_gpus", "exact", "kind", "asks"),
    [
        (False, [1], DecodeKind.DENSE, False),
        (True, [1], DecodeKind.DENSE, True),
        (True, [], DecodeKind.DENSE, False),
        (True, [], DecodeKind.INDEXING, True),
        (False, [], DecodeKind.SELECTING, True),
    ],
)
def test_a_dense_step_asks_the_engine_where_only_it_can_attend(
    two_gpus: bool, exact: list[int], kind: DecodeKind, asks: bool
) -> None:
    link, _ = link_of("look_ahead", two_gpus=two_gpus, exact=exact)
    assert link.program.asks(kind) is asks
    begin(link, kind)
    assert (link.pass_step is not None) is asks
