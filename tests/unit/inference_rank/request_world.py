# SPDX-License-Identifier: Apache-2.0
"""A scheduler like SGLang's with backend and cache rank of one process, without a model.

Each token's K and V name it, so what a step attends to can be read off: tokens of the request
itself, none twice, those that must be there, and samples of what is left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine import DenseLengths, EnginePools, create_engine
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.attention.dense_steps import DenseSteps
from tandemkv.inference_rank.attention.resident_attention import AttendTable, RingTable
from tandemkv.inference_rank.attention.resident_home import OwnSet, ResidentHome
from tandemkv.inference_rank.attention.samples import StepSamples, zeros_on
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.base import Link
from tandemkv.inference_rank.links.local import LocalLink
from tandemkv.kernels.samples import sample_offsets

CPU = torch.device("cpu")
LAYERS, HEADS, QUERY_HEADS, DIM, ROWS1, CONTEXT, NUM_SLOTS = 4, 2, 4, 8, 5, 256, 1024
SINK, RECENT, PAGE, MOST, WARM_UP = 4, 16, 16, 1000, 5
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=LAYERS, num_qo_heads=QUERY_HEADS,
    num_kv_heads=HEADS, head_dim=DIM, hidden_size=QUERY_HEADS * DIM, max_context=CONTEXT,
    dtype="float32", model_hash="0",
)  # fmt: skip


@dataclass(eq=False)
class Request:
    """Its tokens ``[CONTEXT]``, named ``MOST * who + position``, and how many are to be filled."""

    tokens: torch.Tensor
    length: int
    last: int
    row: int = 0
    pages: list[int] = field(default_factory=list)
    behind: int = 0
    """Steps until its set has caught up."""


class Pool:
    """SGLang's pool; free pages hold NaN."""

    def __init__(self, extra: int) -> None:
        shape = (NUM_SLOTS + extra, HEADS, DIM)
        self.k, self.v = ([torch.full(shape, torch.nan) for _ in range(LAYERS)] for _ in range(2))
        for tensor in (*self.k, *self.v):
            tensor[:PAGE] = 0.0

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer], self.v[layer]

    def set_kv_buffer(
        self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor, *_: Any
    ) -> None:
        shape = (-1, HEADS, DIM)
        self.k[layer.layer_id][location.loc] = k.view(shape)
        self.v[layer.layer_id][location.loc] = v.view(shape)


class Full:
    """SGLang's own backend, which writes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing to plan."""

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any, *_: Any
    ) -> torch.Tensor:
        self._pool.set_kv_buffer(layer, SimpleNamespace(loc=batch.out_cache_loc), k, v)
        return torch.zeros_like(q)

    forward_decode = forward_extend


class Layer(nn.Module):
    """Attends with random queries."""

    def __init__(self, index: int, attend: Any) -> None:
        super().__init__()
        self._index, self._attend = index, attend
        self.input_layernorm = nn.Identity()

    def forward(
        self, positions: Any, hidden_states: torch.Tensor, forward_batch: Any, residual: Any
    ) -> Any:
        del positions, residual
        self.input_layernorm(hidden_states)
        self._attend(self._index, forward_batch)
        return torch.randn_like(hidden_states)


class LlamaForCausalLM(nn.Module):
    """A model whose class has an architecture's name, as SGLang's have."""


def kv_of(tokens: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[n, H, D]`` of `tokens` ``[n]``; the first channel names the token."""
    channel = torch.arange(1, HEADS * DIM + 1, dtype=torch.float64).view(HEADS, DIM)
    phase = (tokens.double()[:, None, None] + 0.3 * layer) * channel
    k, v = torch.sin(phase).float(), torch.cos(phase).float()
    k[..., 0] = v[..., 0] = tokens[:, None].float()
    return k, v


class World:
    """A scheduler like SGLang's, without a model."""

    def __init__(self, *, own: bool, seed: int, evaluation: bool = False, **selection: Any) -> None:
        self.random, self.own = random.Random(seed), own
        chosen = {
            "policy": "look_ahead", "budget_tokens": 24, "resident_factor": 1.5, "exact_layers": (),
            "num_sink_tokens": SINK, "num_recent_tokens": RECENT, "fetch_cap": 8,
            "index_dtype": "int4", **selection,
        }  # fmt: skip
        settings = self.settings = RankSettings.model_validate(
            {
                "selection": selection_values(chosen),
                "placement": {"link": "local"},
                "evaluation": evaluation,
            }
        )
        self.selection = settings.selection
        self.num_resident = self.selection.num_resident
        self.lengths = DenseLengths.of(self.selection, self.num_resident)
        self.dense = DenseSteps(self.lengths, self.selection.dense_batch_tokens or 0)
        self.pool = Pool(ROWS1 * self.num_resident)
        self.table = torch.zeros((ROWS1, CONTEXT), dtype=torch.int32)
        self.home = self.make_home()
        samples = self.home.samples
        self.rank = create_engine(
            model=MODEL,
            settings=settings,
            pools=EnginePools(
                k=[t[:NUM_SLOTS] for t in self.pool.k],
                v=[t[:NUM_SLOTS] for t in self.pool.v],
                resident=self.home.sets,
                page_size=PAGE,
                log_weight=None if samples is None else samples.log_weight,
                is_far=own,
            ),
            max_batch=ROWS1 - 1,
            predict_query=lambda _, hidden, __: hidden.view(-1, QUERY_HEADS, DIM).clone(),
        )
        self.model = LlamaForCausalLM()
        self.model.model = nn.Module()
        self.model.model.layers = nn.ModuleList(Layer(i, self.attend) for i in range(LAYERS))
        self.model.logits_processor = nn.Identity()
        self.runtime = SimpleNamespace(
            model=MODEL, counters=Counters(), middle_chunk_row=None, rows_on_host=None
        )
        config = SimpleNamespace(num_hidden_layers=LAYERS, hidden_size=QUERY_HEADS * DIM)
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(
                req_to_token=self.table, req_generation=torch.zeros(ROWS1, dtype=torch.int64)
            ),
            model_config=config, dtype=torch.float32, token_to_kv_pool=self.pool, model=self.model,
        )  # fmt: skip
        self.backend = ResidentBackend(
            runner, Full(self.pool), self.link(runner), self.home, cache_device=CPU, is_far=own,
            selection=self.selection, dense=self.dense, runtime=self.runtime,
        )  # fmt: skip
        self.attend_to_sets = self.backend._sparse.attend
        self.backend._sparse.attend = self.attend_sparse  # type: ignore[method-assign]
        self.pages, self.rows = list(range(1, NUM_SLOTS // PAGE)), list(range(1, ROWS1))
        self.users: dict[int, int] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.kept: list[tuple[Request, list[int]]] = []  # as SGLang's radix tree keeps them
        self.num_made = self.num_checked = self.num_decoded = self.num_small = 0

    def link(self, runner: Any) -> Link:
        return LocalLink(runner, self.rank, MODEL, max_batch=ROWS1 - 1, device=CPU)

    def make_home(self) -> ResidentHome:
        selection, pool, width = self.selection, self.pool, self.num_resident
        tables: dict[str, Any] = {
            "num_resident": width,
            "num_recent": RECENT,
            "num_dense": self.dense.num_dense,
            "max_batch": ROWS1 - 1,
            "device": CPU,
        }
        if self.own:
            return OwnSet(pool, RingTable(**tables), MODEL, selection, zeros_on(CPU))
        shape = (ROWS1, width, HEADS, DIM)
        sets = [
            (k[NUM_SLOTS:].view(shape), v[NUM_SLOTS:].view(shape))
            for k, v in zip(pool.k, pool.v, strict=True)
        ]
        in_pool = None
        if selection.num_samples:
            in_pool = StepSamples(pool, MODEL, selection, ROWS1 - 1, zeros_on(CPU))
        return ResidentHome(pool, AttendTable(**tables, first_slot=NUM_SLOTS), sets, in_pool)

    # -- what SGLang does ----------------------------------------------------------------

    def forward(self, batch: Any) -> None:
        """Run a step."""
        self.backend.init_forward_metadata(batch)
        hidden = torch.randn(len(batch.tokens), QUERY_HEADS * DIM)
        for layer in self.model.model.layers:
            hidden = layer(None, hidden, batch, None)
        self.model.logits_processor(hidden)

    def attend(self, index: int, batch: Any) -> None:
        layer = SimpleNamespace(
            layer_id=index, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS, head_dim=DIM,
            scaling=0.0,
        )  # fmt: skip
        k, v = (t.flatten(1) for t in kv_of(batch.tokens, index))
        q = torch.randn(len(k), QUERY_HEADS * DIM)
        if not batch.forward_mode.is_decode():
            self.backend.forward_extend(q, k, v, layer, batch)
            return
        self.backend.forward_decode(q, k, v, layer, batch)

    def attend_sparse(self, *given: Any, **options: Any) -> torch.Tensor:
        """Attend to resident sets, and look at what is there then: later, others may be."""
        out: torch.Tensor = self.attend_to_sets(*given, **options)
        assert bool(out[: len(self.running)].isfinite().all())
        for place, request in enumerate(self.running):
            self.check(given[3].layer_id, place, request)
        return out

    def prefill(self, request: Request, start: int, end: int) -> None:
        """Compute a chunk of a request's tokens."""
        self.runtime.middle_chunk_row = request.row if end < request.length else None
        # From SGLang's scheduler, or, without one, from the device.
        self.runtime.rows_on_host = self.random.choice([None, [request.row]])
        self.forward(
            SimpleNamespace(
                forward_mode=ForwardMode.EXTEND,
                batch_size=1,
                tokens=request.tokens[start:end],
                out_cache_loc=self.table[request.row, start:end].long(),
                extend_prefix_lens_cpu=[start],
                seq_lens_cpu=torch.tensor([end]),
                req_pool_indices=torch.tensor([request.row]),
            )
        )

    def decode(self) -> None:
        """Run a step of all requests, some of them padded as a graph's batch; some leave it."""
        for request in self.running:
            request.length += 1
            self.grow(request)
        rows, lengths = ([getattr(r, name) for r in self.running] for name in ("row", "length"))
        padding = self.random.choice([0, ROWS1 - 1 - len(rows)])
        rows, lengths = rows + [0] * padding, lengths + [1] * padding
        self.num_decoded += len(self.running)
        self.note_load(sum(lengths[: len(self.running)]))
        tokens = [r.tokens[r.length - 1] for r in self.running] + [torch.tensor(0)] * padding
        at = zip(rows, lengths, strict=True)
        self.forward(
            SimpleNamespace(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(rows),
                num_padding=padding,
                tokens=torch.stack(tokens),
                out_cache_loc=torch.tensor([int(self.table[r, n - 1]) if r else 0 for r, n in at]),
                req_pool_indices=torch.tensor(rows),
                seq_lens=torch.tensor(lengths),
                seq_lens_cpu=torch.tensor(lengths),
            )
        )
        for request in list(self.running):
            is_done, is_retracted = request.length >= request.last, self.random.random() < 0.01
            if is_done or is_retracted:
                self.running.remove(request)
                self.release(request)
            if is_retracted and not is_done:
                self.waiting.append(request)
        if self.random.random() < 0.2:
            self.random.shuffle(self.running)

    def note_load(self, total: int) -> None:
        """Work out what the step has to attend to as a whole, by the number of its tokens."""
        few, self.num_dense = self.selection.dense_batch_tokens, self.lengths.num_dense
        is_small = bool(few) and total <= few
        self.num_small += is_small
        for request in self.running:
            if is_small:
                request.behind = WARM_UP if request.length > self.lengths.num_cold else 0
            elif request.behind:
                request.behind -= 1
                self.num_dense = max(self.num_dense, request.length)
        if is_small:
            self.num_dense = self.dense.num_dense

    def admit(self) -> None:
        """Prefill a request, perhaps in chunks with decode steps between them."""
        request = self.waiting.pop() if self.waiting else self.make_request()
        request.row = self.rows.pop(self.random.randrange(len(self.rows)))
        self.table[request.row] = self.random.randrange(NUM_SLOTS)
        start = 0
        for other, pages in self.kept:
            same = min(len(pages) * PAGE, request.length - 1)
            differ = (other.tokens[:same] != request.tokens[:same]).nonzero()
            same = (int(differ[0]) if len(differ) else same) // PAGE
            if same * PAGE > start:
                start, request.pages = same * PAGE, pages[:same]
        for page in request.pages:
            self.users[page] += 1
        self.grow(request)
        while start < request.length:
            end = min(request.length, start + self.random.randrange(1, 120))
            self.prefill(request, start, end)
            start = end
            if start < request.length and self.running:
                self.decode()
        self.running.append(request)

    def make_request(self) -> Request:
        self.num_made += 1
        tokens = MOST * self.num_made + torch.arange(CONTEXT)
        if self.kept and self.random.random() < 0.5:
            other, pages = self.random.choice(self.kept)
            shared = self.random.randrange(len(pages) * PAGE + 1)
            tokens[:shared] = other.tokens[:shared]
        most = self.lengths.num_cold
        near = self.random.choice([most - 9, most, most + 1, most + 2])
        length = self.random.choice([1, near, near, self.random.randrange(2, 180)])
        return Request(tokens, length, min(CONTEXT, length + self.random.randrange(1, 60)))

    def grow(self, request: Request) -> None:
        """Give a request the pages that it needs."""
        for index in range(len(request.pages), -(-request.length // PAGE)):
            request.pages = [*request.pages, self.pages.pop(self.random.randrange(len(self.pages)))]
            self.users[request.pages[index]] = 1
        slots = torch.tensor(request.pages)[:, None] * PAGE + torch.arange(PAGE)
        self.table[request.row, : slots.numel()] = slots.flatten()[:CONTEXT].to(torch.int32)

    def release(self, request: Request) -> None:
        """Take row and pages back, and keep the whole pages for a while."""
        whole = request.pages[: request.length // PAGE]
        for page in whole:
            self.users[page] += 1
        self.kept.append((request, whole))
        dropped = self.kept.pop(0)[1] if len(self.kept) > 3 else []
        for page in (*request.pages, *dropped):
            self.users[page] -= 1
            if not self.users[page]:
                self.pages.append(page)
                for tensor in (*self.pool.k, *self.pool.v):
                    tensor[page * PAGE : (page + 1) * PAGE] = torch.nan
        self.rows.append(request.row)
        request.pages, request.behind = [], 0

    # -- what must hold ------------------------------------------------------------------

    def check(self, layer: int, place: int, request: Request) -> None:
        """Look at what a request has just attended to."""
        table, length = self.home.table, request.length
        slots = table.slots[place, : int(table.attended[place])].long()
        k, v = (t[slots][..., 0].t() for t in self.home.pool.get_kv_buffer(layer))
        assert torch.equal(k, v)
        is_sparse = length > self.num_dense
        held = (k.long() % MOST).sort(1).values
        assert torch.equal(k.sort(1).values.long(), request.tokens[held].sort(1).values)
        assert bool((held.diff(dim=1) > 0).all()), "a token twice"
        assert held.shape[1] == (self.num_resident + RECENT if is_sparse else length)
        assert torch.equal(held[:, :SINK], torch.arange(min(SINK, length)).expand(HEADS, -1))
        latest = torch.arange(max(0, length - RECENT), length)
        assert torch.equal(held[:, -RECENT:], latest.expand(HEADS, -1))
        self.num_checked += 1
        if is_sparse and self.home.samples is not None:
            self.check_samples(layer, place, request, held)

    def check_samples(self, layer: int, place: int, request: Request, held: torch.Tensor) -> None:
        samples: Any = self.home.samples
        count = request.length - RECENT - SINK
        offsets, _ = sample_offsets(torch.tensor(count), samples.num_samples)
        pool = samples.k[layer].flatten(0, 1) if self.own else self.pool.k[layer]
        for head, weight in enumerate(samples.log_weight[layer, request.row]):
            counted = weight > float("-inf")
            positions = offsets[counted] + SINK
            assert torch.equal(
                pool[samples._slots[place][counted].long(), head, 0].long(),
                request.tokens[positions],
            )
            if bool(counted.any()) and self.rank.program.refresh_every == 1:
                assert not set(positions.tolist()) & set(held[head].tolist())
                left_out = request.length - held.shape[1]
                assert float(weight.exp().sum()) == pytest.approx(left_out, rel=1e-3)
