# SPDX-License-Identifier: Apache-2.0
"""When a step's selections are queued, and with which residual stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.links.local import LocalLink
from tandemkv.inference_rank.links.side_stream import SideStream
from tandemkv.inference_rank.sglang.residual_hooks import (
    install_logits_hook,
    install_residual_hooks,
)

CPU, LAYERS, WIDTH = torch.device("cpu"), 4, 3


class Norm(nn.Module):
    """As SGLang's: adds in place, and returns what it normalised and the sum."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return hidden * 0
        residual += hidden
        hidden.zero_()
        return hidden, residual


class Layer(nn.Module):
    """A decoder layer that adds one, after calling its norm as a module, or past it."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self._is_fused = is_fused

    def forward(
        self,
        positions: Any,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's own output and the residual stream before it."""
        hidden = hidden_states
        norm = self.input_layernorm.forward if self._is_fused else self.input_layernorm
        if residual is None:
            residual = hidden
            hidden = norm(hidden)
        else:
            hidden, residual = norm(hidden, residual)
        forward_batch.attend()
        return torch.ones_like(hidden), residual


class Rank:
    """Notes what is selected for, with the first element of the stream that it is given."""

    def __init__(self, late_layers: tuple[int, ...]) -> None:
        self.late_layers = late_layers
        self.program, self.last_entry = self, LAYERS - 2
        self.num_lanes, self.needs_hidden = 2, True
        self.seen: list[tuple[Any, ...]] = []

    def lane_of(self, layer: int) -> int:
        return layer % 2

    def followers_of(self, layer: int) -> tuple[int, ...]:
        return ()

    def targets_of(self, layer: int) -> tuple[int, ...]:
        found = (0, 1) if layer == 0 else (layer + 1,)
        return tuple(x for x in found if x < LAYERS and x not in self.late_layers)

    def choose_ahead(self, layer: int, hidden: torch.Tensor) -> None:
        self.seen.append(("ahead", layer, float(hidden[0, 0])))

    def choose_late(self, layer: int, hidden: torch.Tensor) -> None:
        self.seen.append(("late", layer, float(hidden[0, 0])))

    def fetch(self, layer: int, size: int) -> None:
        self.seen.append(("fetch", layer, size))


class RawAttention(nn.Module):
    """Reads the residual stream as it is."""

    def forward(
        self, positions: Any, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        forward_batch.attend()
        return torch.ones_like(hidden_states)


class RawLayer(nn.Module):
    """Like OLMo-2's: no norm before attention, and no residual beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = RawAttention()

    def forward(
        self, positions: Any, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        return hidden_states + self.self_attn(positions, hidden_states, forward_batch)


class PartLayer(nn.Module):
    """As from SGLang 0.5.21 on: the layer's own part is given, the rest is in the batch."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self._is_fused = is_fused

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> torch.Tensor:
        norm = self.input_layernorm.forward if self._is_fused else self.input_layernorm
        if forward_batch.residual is None:
            forward_batch.residual, hidden = hidden_states, norm(hidden_states)
        else:
            hidden, forward_batch.residual = norm(hidden_states, forward_batch.residual)
        forward_batch.attend()
        return torch.ones_like(hidden)


def as_model(architecture: str, layers: Any) -> Any:
    """Return what SGLang calls a model of that architecture."""
    model = type(architecture, (), {})()
    model.model = SimpleNamespace(layers=layers)
    return model


def step(
    rank: Any, *, selecting: bool = True, is_fused: bool = False, is_raw: bool = False,
    in_parts: bool = False, linear: tuple[int, ...] = (), num_requests: int = 1,
) -> LocalLink:  # fmt: skip
    """Run a step of one request whose stream is 5, 6, 7, 8 at the entries of the layers."""
    layers = nn.ModuleList(
        RawLayer() if is_raw else (PartLayer if in_parts else Layer)(is_fused=is_fused)
        for _ in range(LAYERS)
    )
    model = as_model("Olmo2ForCausalLM" if is_raw else "LlamaForCausalLM", layers)
    model.logits_processor = nn.Identity()
    runner = SimpleNamespace(
        model=model, dtype=torch.float32, model_config=SimpleNamespace(hidden_size=WIDTH)
    )
    spec: Any = SimpleNamespace(num_layers=LAYERS, linear_layers=linear)
    link = LocalLink(runner, rank, spec, max_batch=2, device=CPU)
    link._kind, link._is_decode = DecodeKind.SELECTING, selecting
    link._num_requests = num_requests
    hidden, residual = torch.full((1, WIDTH), 5.0), None
    batch = SimpleNamespace(attend=lambda: None, residual=None)
    for layer in layers:
        if is_raw or in_parts:
            hidden = layer(None, hidden, batch)
        else:
            hidden, residual = layer(None, hidden, batch, residual)
    return link


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_is_selected_when(late: int, in_parts: bool) -> None:
    """Late layers come last, with the streams of their own entries."""
    rank = Rank(tuple(range(late)))
    link = step(rank, in_parts=in_parts)
    in_step = [(0, 5.0), (1, 5.0), (2, 6.0), (3, 7.0)][late:]
    want: list[tuple[Any, ...]] = []
    for layer, value in in_step:
        want += [("ahead", layer, value), ("fetch", layer, 1)]
    for layer in range(late):
        want += [("late", layer, 5.0 + layer), ("fetch", layer, 1)]
    assert rank.seen == want
    assert link._is_pending is (late > 0)


@pytest.mark.parametrize(("linear", "lanes", "count"), [((), 2, 3), ((1, 2), 2, 1), ((), 0, 0)])
def test_a_stream_is_read_beside_a_layer_whose_attention_waits_for_it(
    linear: tuple[int, ...], lanes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is copied in place: SGLang attends past the link, or the lane is not free yet."""
    rank, read = Rank(()), []
    monkeypatch.setattr(SideStream, "note_read", lambda _: read.append(len(rank.seen)))
    rank.num_lanes = lanes
    step(rank, linear=linear)
    assert len(read) == count
    assert [x[1:] for x in rank.seen if x[0] == "ahead"] == [(0, 5.0), (1, 5.0), (2, 6.0), (3, 7.0)]


def test_layers_without_a_norm_before_attention() -> None:
    rank = Rank(())
    step(rank, is_raw=True)
    assert [x[1:] for x in rank.seen if x[0] == "ahead"] == [(0, 5.0), (1, 5.0), (2, 6.0), (3, 7.0)]


def test_other_steps_select_nothing() -> None:
    rank = Rank((0,))
    assert not step(rank, selecting=False)._is_pending
    assert rank.seen == []


def test_a_part_of_a_batch_is_not_taken_for_the_whole() -> None:
    """Such as a rank gets where SGLang shares out a batch's rows between layers."""
    rank = Rank(())
    with pytest.raises(ContractError, match="layer 0: SGLang gave it 1 of the 2 requests"):
        step(rank, num_requests=2)
    assert rank.seen == []
    step(rank, num_requests=2, selecting=False)


def test_a_norm_that_is_not_called_as_a_module_stops_the_capture() -> None:
    for in_parts in (False, True):
        with pytest.raises(ContractError, match=r"layer 0: SGLang has not called input_layernorm"):
            step(Rank(()), is_fused=True, in_parts=in_parts)


def test_a_norm_that_others_call_says_nothing_of_the_stream() -> None:
    """What predicts the next layer's query may call that layer's norm."""
    layers = nn.ModuleList(PartLayer(is_fused=False) for _ in range(2))
    seen: list[tuple[int, float]] = []

    def on_stream(layer: int, hidden: torch.Tensor) -> None:
        seen.append((layer, float(hidden[0, 0])))
        if layer == 0:
            layers[1].input_layernorm(hidden)

    install_residual_hooks(as_model("LlamaForCausalLM", layers), on_stream)
    hidden = torch.full((1, WIDTH), 5.0)
    batch = SimpleNamespace(attend=lambda: None, residual=None)
    for layer in layers:
        hidden = layer(None, hidden, batch)
    assert seen == [(0, 5.0), (1, 6.0)]


class QuantisingNorm(Norm):
    """Returns values, scale and dtype where SGLang's norm quantises for the projection after it."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        found = super().forward(hidden, residual)
        scale = torch.tensor(0.5), torch.bfloat16
        return (found, *scale) if residual is None else ((found[0], *scale), found[1])


@pytest.mark.parametrize("by_name", [False, True])
def test_a_norm_that_quantises_has_the_stream_as_others_have(by_name: bool) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm = QuantisingNorm()

        def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> None:
            if residual is None:
                self.input_layernorm(hidden_states)
            elif by_name:
                self.input_layernorm(hidden_states, residual=residual)
            else:
                self.input_layernorm(hidden_states, residual)

    layers = nn.ModuleList(Quantised() for _ in range(2))
    seen: list[tuple[int, torch.Tensor]] = []
    install_residual_hooks(
        as_model("LlamaForCausalLM", layers), lambda layer, stream: seen.append((layer, stream))
    )
    layers[0](torch.full((2, WIDTH), 5.0), None)
    layers[1](torch.full((2, WIDTH), 1.0), torch.full((2, WIDTH), 5.0))
    assert [(layer, stream.shape, float(stream[0, 0])) for layer, stream in seen] == [
        (0, (2, WIDTH), 5.0), (1, (2, WIDTH), 6.0),
    ]  # fmt: skip


def test_models_without_what_is_hooked_are_refused() -> None:
    layers = [nn.Linear(1, 1)]
    with pytest.raises(ContractError, match=r"RawLayer has no input_layernorm.*stock SGLang"):
        install_residual_hooks(as_model("LlamaForCausalLM", [RawLayer()]), lambda *_: None)
    with pytest.raises(ContractError, match=r"Gemma2.*caps.*docs/models\.md"):
        install_residual_hooks(as_model("Gemma2ForCausalLM", layers), lambda *_: None)
    with pytest.raises(ContractError, match=r"Linear takes .*no hidden_states"):
        install_residual_hooks(as_model("LlamaForCausalLM", layers), lambda *_: None)
    with pytest.raises(ContractError, match=r"no model\.layers"):
        install_residual_hooks(nn.Identity(), lambda *_: None)
    with pytest.raises(ContractError, match=r"no logits_processor.*--late-layers 0"):
        install_logits_hook(SimpleNamespace(), lambda: None)


def test_logits_end_a_step() -> None:
    ends: list[str] = []
    model = SimpleNamespace(logits_processor=nn.Identity())
    install_logits_hook(model, lambda: ends.append("end"))
    model.logits_processor(torch.zeros(1))
    assert ends == ["end"]
