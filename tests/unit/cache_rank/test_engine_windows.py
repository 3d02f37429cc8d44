# SPDX-License-Identifier: Apache-2.0
"""Policies with windows of queries in the engine, against their own classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tandemkv.cache_rank.engine.cache_engine import CacheEngine
from tandemkv.cache_rank.engine.factory import create
from tandemkv.cache_rank.engine.rotary import read_rotary
from tandemkv.cache_rank.policies.base import (
    PolicyContext,
    PolicyError,
    ScoringPolicy,
    SelectionInput,
    StoredKV,
)
from tandemkv.cache_rank.policies.mean_query import MeanQueryPolicy
from tandemkv.cache_rank.policies.registry import find_policy, selection_values
from tandemkv.cache_rank.protocol.engine import DenseLengths, EnginePools
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

HEADS, QUERY_HEADS, DIM, ROWS1, CONTEXT, BUDGET, RECENT, SINK = 2, 4, 16, 4, 256, 32, 16, 4
EXACT, SPARSE = 0, 1  # the two layers
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=2,
    num_qo_heads=QUERY_HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    hidden_size=QUERY_HEADS * DIM,
    max_context=CONTEXT,
    dtype="float32",
    model_hash="0",
)


class Turned(MeanQueryPolicy):
    """A user's own prediction, for which there is no kernel."""

    def predict(self, windows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return -super().predict(windows, counts)


@pytest.fixture(params=["llama", "glm4"])
def model_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory with nothing but ``config.json``, as with dummy weights.

    GLM-4 turns neighbours, and in half of a head only.
    """
    is_glm = request.param == "glm4"
    config = {
        "architectures": ["Glm4ForCausalLM" if is_glm else "LlamaForCausalLM"],
        "model_type": request.param,
        "head_dim": DIM,
        "hidden_size": QUERY_HEADS * DIM,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": 2,
        "rope_theta": 100.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


class Twins:
    """The same requests in an in-process rank and in the policy's own class."""

    def __init__(self, model_dir: Path | None, **selection: object) -> None:
        chosen = {
            "budget_tokens": BUDGET,
            "num_sink_tokens": SINK,
            "num_recent_tokens": RECENT,
            "fetch_cap": BUDGET,  # so that whatever is selected is resident afterwards
            "exact_layers": (EXACT,),
            **selection,
        }
        settings = RankSettings.model_validate(
            {"selection": selection_values(chosen), "placement": {"link": "local"}}
        )
        self.selection = settings.selection
        width = self.selection.num_resident
        self.num_cold = DenseLengths.of(self.selection, width).num_cold
        self.generator = torch.Generator().manual_seed(5)
        pools = [self.random(ROWS1 * CONTEXT, HEADS, DIM) for _ in range(4)]
        sets = [torch.zeros(ROWS1, width, HEADS, DIM) for _ in range(4)]
        self.table = torch.randperm(ROWS1 * CONTEXT - 1, generator=self.generator) + 1
        self.table = torch.cat([torch.zeros(1), self.table]).view(ROWS1, CONTEXT).int()
        self.keys = pools[SPARSE]
        self.rank: CacheEngine = create(
            model=MODEL,
            settings=settings,
            pools=EnginePools(
                k=pools[:2],
                v=pools[2:],
                resident=list(zip(sets[:2], sets[2:], strict=True)),
                page_size=1,
            ),
            max_batch=4,
            predict_query=lambda *_: pytest.fail("nothing is predicted from the residual stream"),
            model_dir=model_dir,
        )
        rotary = read_rotary(model_dir) if model_dir is not None else None
        context = PolicyContext(model=MODEL, selection=self.selection, rotary=rotary)
        policy = find_policy(self.selection.policy)(context)
        assert isinstance(policy, ScoringPolicy)
        self.policy = policy

    def random(self, *shape: int) -> torch.Tensor:
        """Draw normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def prompt(self, row: int, length: int) -> None:
        """Begin a request; only one that is long enough is seeded."""
        table = self.table[row, :length]
        self.rank.begin_extend([row], [0], [length], [table])
        self.policy.release((row, 1))
        if length > self.num_cold:
            queries = self.random(24, QUERY_HEADS, DIM)
            self.rank.seed(SPARSE, 0, row, queries)
            self.policy.observe_prompt(SPARSE, (row, 1), queries, torch.arange(length - 24, length))

    def step(self, rows: list[int], lengths: list[int]) -> torch.Tensor:
        """Run a step in which row 0 is padding; returns the true queries."""
        if self.num_cold + 1 in lengths:
            row = torch.tensor([rows[lengths.index(self.num_cold + 1)]])
            self.rank.seed_identity(row, self.table[row, : self.selection.num_resident])
        query = self.random(len(rows), QUERY_HEADS, DIM)
        query[[row == 0 for row in rows]] = float("nan")
        self.rank.begin_step()
        self.rank.begin_decode(torch.tensor(rows), torch.tensor(lengths), self.table)
        if max(lengths) > self.num_cold:
            self.rank.choose(SPARSE, query)
            self.rank.fetch(SPARSE, len(query))
        elif self.rank.program.keeps_queries:
            self.rank.observe(SPARSE, query)
        real = [i for i, row in enumerate(rows) if row]
        positions = torch.tensor(lengths)[real] - 1
        self.policy.observe(SPARSE, [(rows[i], 1) for i in real], query[real], positions)
        return query

    def check(self, row: int, length: int, query: torch.Tensor) -> None:
        """What the class predicts selects, in float64, what is resident for the next step."""
        hi = length + 1 - RECENT
        slots = self.table[row, None]
        request = SelectionInput(
            layer=SPARSE,
            owners=[(row, 1)],
            rows=torch.tensor([row]),
            query=query[None],
            positions=torch.tensor([length - 1]),
            use_positions=torch.tensor([length]),
            score=lambda _: pytest.fail("scored below"),
            budget=BUDGET,
            lo=torch.tensor([SINK]),
            hi=torch.tensor([hi]),
            stored=StoredKV(self.keys, self.keys, slots),
        )
        predicted = self.policy.query_for(request).double().view(HEADS, -1, DIM)
        keys = self.keys[slots[0, SINK:hi].long()].double()
        logits = torch.einsum("hgd,nhd->hgn", predicted, keys) * MODEL.scale
        pooled, reach = torch.softmax(logits, -1).mean(1), self.selection.pooled_positions
        if any(reach):
            padded = torch.nn.functional.pad(pooled, reach)
            pooled = torch.nn.functional.max_pool1d(padded, sum(reach) + 1, 1)
        least = pooled.topk(BUDGET).values[:, -1:]
        # Neighbours share a score: of those that have the last one, any will do.
        best = pooled > least if any(reach) else pooled >= least
        assert int(best.sum()) > 0
        positions = self.rank._mirror.positions[0, row]
        for head in range(HEADS):
            wanted = (best[head].nonzero()[:, 0] + SINK).tolist()
            assert set(wanted) <= set(positions[head].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "async_spade"},
        {"policy": "async_spade", "pool_before": 1},
        {"policy": "async_spade", "options": {"window": 5}},
        {"policy": "async_spade", "options": {"unrotate": False, "sign": -1}},
        {"policy": "async_spade", "options": {"normalise": "none", "window": 3}},
        {"policy": "mean_query", "options": {"window": 20}},
        {"policy": f"{__name__}:Turned"},
        {"policy": "last_query"},
    ],
    ids=lambda options: "-".join(f"{v}" for v in options.values()),
)
def test_selects_what_the_policy_predicts(model_dir: Path, options: dict[str, object]) -> None:
    twins = Twins(model_dir, **options)
    twins.prompt(1, 140)
    twins.prompt(3, 110)
    for step in range(1, 9):
        lengths = [110 + step, 1, 140 + step]
        query = twins.step([3, 0, 1], lengths)
        twins.check(3, lengths[0], query[0])
        twins.check(1, lengths[2], query[2])


@pytest.mark.parametrize("beside", [True, False])
def test_a_row_gets_a_new_window_with_each_prompt(model_dir: Path, beside: bool) -> None:
    """Dense at first, alone or beside a sparse request: its queries count once it has grown."""
    twins = Twins(model_dir, policy="async_spade")
    for length in (150, 180):  # the second prompt's window has nothing of the first
        twins.prompt(1, length)
        query = twins.step([1], [length + 1])
        twins.check(1, length + 1, query[0])
    twins.prompt(2, 160)
    start = twins.num_cold - 3
    twins.prompt(1, start - 4)
    for step in range(1, 5):
        twins.step([1], [start - 4 + step])
    # It begins at the position at which the last one ended: positions do not tell them apart.
    twins.prompt(1, start)
    for step in range(1, 8):
        rows, lengths = [1], [start + step]
        if beside:
            rows, lengths = [2, 1], [160 + step, start + step]
        query = twins.step(rows, lengths)
        if lengths[-1] > twins.num_cold:
            twins.check(1, lengths[-1], query[-1])
    count = 7  # all queries since the prompt, none of the requests before
    windows = twins.policy.windows.stack(SPARSE, [(1, 1)])  # type: ignore[attr-defined]
    assert windows[1].tolist() == [count]


def test_windows_count_as_memory(model_dir: Path) -> None:
    with_windows = Twins(model_dir, policy="mean_query", options={"window": 7}).rank.nbytes
    without = Twins(model_dir, policy="last_query").rank.nbytes
    assert with_windows - without == ROWS1 * (7 + 2) * QUERY_HEADS * DIM * 4


def test_windows_that_are_too_long(model_dir: Path) -> None:
    with pytest.raises(PolicyError, match=r"window.*less than or equal to 16"):
        Twins(model_dir, policy="async_spade", options={"window": 17})


def test_unrotation_needs_the_model_directory() -> None:
    with pytest.raises(PolicyError, match="rotary"):
        Twins(None, policy="async_spade")
