# SPDX-License-Identifier: Apache-2.0
"""Versions that are taken, and what is done as each of them wants it.

One version is installed. What the others want is tried on stand-ins with their names.
"""

from __future__ import annotations

import importlib
import math
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed import bootstrap
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.attention.resident_attention import AttendTable, FlashInferResident
from tandemkv.inference_rank.sglang import contract as sglang_contract
from tandemkv.inference_rank.sglang import versions as sglang_versions

CPU = torch.device("cpu")


def assume(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the adapter take ``0.5.<number>`` for what is installed."""
    monkeypatch.setattr(sglang_versions, "_number", lambda: number)


@pytest.mark.parametrize("version", sglang_versions.VERSIONS)
def test_each_version_is_taken(version: str) -> None:
    number = int(version.rpartition(".")[2])
    for text in (version, f"{version}.post1", f"{version}+cu130"):
        assert sglang_versions.check_version(text) == number


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.5.2", "0.6.0", "0.5.23rc1", "main"])
def test_others_are_refused_in_one_sentence_that_says_what_to_install(version: str) -> None:
    with pytest.raises(ContractError) as caught:
        sglang_versions.check_version(version)
    text = str(caught.value)
    assert text.startswith(f"sglang=={version} is installed, and tandemkv takes 0.5.17 to 0.5.23;")
    assert "install sglang==0.5.17" in text
    with pytest.raises(ContractError, match=r"not installed; install sglang==0\.5\.17"):
        sglang_versions.check_version(None)


def test_the_installed_version_has_all_that_is_used_of_it() -> None:
    sglang_contract.check_contract()


def test_what_another_version_has_is_named_where_it_is_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if SGLang were half replaced: all that does not fit stands in one error."""
    is_new = sglang_versions.check_version(sglang_versions.installed()) >= 22
    other = sglang_versions.OLDEST if is_new else sglang_versions.NEWEST
    monkeypatch.setattr(sglang_versions, "installed", lambda: other)
    with pytest.raises(ContractError) as caught:
        sglang_contract.check_contract()
    lacking = "is_insert in" if is_new else "checkpoint in"
    assert f"sglang=={other} lacks " in str(caught.value)
    assert f"{lacking} sglang.srt.mem_cache.common.release_kv_cache" in str(caught.value)
    assert f"install sglang=={other} anew" in str(caught.value)


def test_every_version_has_an_entry_for_what_differs() -> None:
    numbers = [sglang_versions.check_version(version) for version in sglang_versions.VERSIONS]
    for number in numbers:
        found = sglang_versions.symbols_of(number)
        assert {"ReqKvInfo", "release_req", "release_kv_cache"} <= {
            name.rpartition(".")[2] for name in found
        }
    with_server_args = [
        number
        for number in numbers
        if "server_args"
        in sglang_versions.symbols_of(number)["sglang.srt.managers.schedule_batch.release_req"]
    ]
    assert with_server_args == [17, 18]


def test_where_a_version_was_run() -> None:
    assert sglang_versions.not_run("0.5.17", on_gpu=True) == ""
    assert sglang_versions.not_run("0.5.17", on_gpu=False) == ""
    assert "0.5.23 is taken, and was not run" in sglang_versions.not_run("0.5.23", on_gpu=True)
    assert "that was 0.5.17 (docs" in sglang_versions.not_run("0.5.23", on_gpu=True)
    assert sglang_versions.not_run("0.5.23", on_gpu=False) == ""
    assert "that was 0.5.17 and 0.5.23 (docs" in sglang_versions.not_run("0.5.22", on_gpu=False)


@pytest.mark.parametrize("number", [17, 18, 19, 23])
def test_rows_and_lengths_of_requests(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, number)
    own = {"req_pool_idx": torch.tensor(3), "kv_committed_len": 9}
    kv = SimpleNamespace(kv_allocated_len=12)
    if number < 19:
        req = SimpleNamespace(kv=kv, **own)
        waiting = SimpleNamespace(kv=None, req_pool_idx=None, kv_committed_len=0)
    else:
        req = SimpleNamespace(kv=kv)
        vars(kv).update(own)
        waiting = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=None))
    assert sglang_versions.row_of(req) == 3
    assert sglang_versions.committed(req) == 9
    assert sglang_versions.row_of(waiting) is None
    sglang_versions.set_stored(req, 7)
    assert (sglang_versions.committed(req), kv.kv_allocated_len) == (7, 7)
    assert not hasattr(req, "kv_committed_len") or number < 19


@pytest.mark.parametrize("number", [17, 20, 21, 23])
def test_threads_are_bound_as_in_a_group_of_one(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.5.21 on SGLang's function takes no ranks: it would end the start of each node."""
    assume(monkeypatch, number)
    group = SimpleNamespace(tp_size=4, tp_rank=3, pp_rank=0)
    monkeypatch.setattr(bootstrap, "get_parallel", lambda: group, raising=False)

    def with_ranks(*, tp_size: int, tp_rank: int, local_omp_cpuid: str) -> Any:
        return tp_size, tp_rank, 0, local_omp_cpuid

    def by_context(*, local_omp_cpuid: str) -> Any:
        found = bootstrap.get_parallel()
        return found.tp_size, found.tp_rank, found.pp_rank, local_omp_cpuid

    ranks = {"tp_size": 4, "tp_rank": 3} if number < 21 else {}
    bind = with_ranks if ranks else by_context
    bound = sglang_versions.bind_threads_of_one(bind, local_omp_cpuid="7", **ranks)
    assert bound == (1, 0, 0, "7")
    assert bootstrap.get_parallel() is group


@pytest.mark.parametrize("number", [17, 21, 22, 23])
def test_nothing_of_a_request_is_kept(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, number)
    seen: list[Any] = []

    def older(req: Any, tree_cache: Any, is_insert: bool = True) -> None:
        seen.append((req, tree_cache, is_insert))

    def newer(req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        seen.append((req, tree_cache, checkpoint))

    common = importlib.import_module("sglang.srt.mem_cache.common")
    monkeypatch.setattr(common, "release_kv_cache", older if number < 22 else newer)
    sglang_versions.give_up("req", "tree")
    assert seen == [("req", "tree", False)]


@pytest.mark.parametrize("number", [18, 19])
def test_requests_that_wait_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, number)
    seen: dict[str, Any] = {}
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    monkeypatch.setattr(batches, "release_req", lambda **given: seen.update(given))
    names = ("server_args", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache")
    sglang_versions.retract("req", SimpleNamespace(**{name: name for name in names}))
    assert seen.pop("server_args", None) == ("server_args" if number < 19 else None)
    own = {name: name for name in names[1:]}
    assert seen == {"req": "req", "remaing_req_count": 0, "hisparse_coordinator": None, **own}


class Pool:
    """Describes its buffers as SGLang 0.5.22 does: as many rows as tokens and a page."""

    def __init__(self, rows: int, fails: bool = False) -> None:
        self.size, self.page_size, self.num_pointers = 4, 2, 0
        self.k_buffer = self.v_buffer = [torch.zeros(rows, 1, 1)]
        self._fails = fails

    def _build_kv_buffer_descs(self) -> list[int]:
        if self._fails or len(self.k_buffer[0]) != self.size + self.page_size:
            raise ValueError("does not lead with as many rows")
        return [self.size]

    def _init_data_ptrs_and_strides(self) -> None:
        self.num_pointers += 1


def test_a_pool_with_resident_sets_behind_its_tokens_is_described() -> None:
    pool: Any = Pool(rows=11)
    sglang_versions.describe_buffers(pool)
    assert (pool._kv_buffer_descs, pool.num_pointers, pool.size) == ([9], 1, 4)
    broken = Pool(rows=11, fails=True)
    with pytest.raises(ValueError, match="rows"):
        sglang_versions.describe_buffers(broken)
    assert broken.size == 4, "SGLang's allocator goes by it"
    sglang_versions.without_scales(pool)
    assert pool.dq_k_buffer is pool.native_v_scale_buffer is pool.k_scale_buffer is None


def test_the_request_table_is_read_until_a_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
    ends = SimpleNamespace(UNKNOWN="all of it")
    monkeypatch.setattr(base, "SharedReadEnds", ends, raising=False)
    assert sglang_versions.end_of_reads() == "all of it"


@pytest.mark.parametrize("is_prompt", [True, False], ids=["prompt", "decode"])
def test_a_list_of_log_probabilities_beside_a_request_without_one(
    is_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both functions that bring a pass's figures to lists take one tensor a request."""
    logprobs = importlib.import_module("sglang.srt.layers.logprob_processor")
    for target, hook in sglang_versions.mended_logprobs().items():
        name = target.rpartition(".")[2]
        monkeypatch.setattr(logprobs, name, partial(hook, getattr(logprobs, name)))
    figures = torch.randn(2, 10).log_softmax(-1)
    found = logprobs.OutputLogprobProcessor().compute_logprobs(
        figures, [0, 0], [[1, 2], None], torch.tensor([3, 4])
    )
    output = SimpleNamespace(
        next_token_logprobs=found.token_logprobs,
        input_token_logprobs=None,
        next_token_top_logprobs_val=None,
        next_token_token_ids_logprobs_val=found.token_ids_logprobs_val,
        finalize_input_logprobs=lambda: None,
    )
    results = importlib.import_module(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
    ).SchedulerBatchResultProcessor
    batch = SimpleNamespace(
        return_logprob=True, spec_algorithm=SimpleNamespace(is_none=lambda: True)
    )
    if is_prompt:
        results.move_logprobs_to_cpu(None, batch=batch, logits_output=output)
    else:
        results._normalize_decode_outputs(
            None, batch=batch, result=None, logits_output=output, next_token_ids=[3, 4]
        )
    assert output.next_token_token_ids_logprobs_val == [figures[0, [1, 2]].tolist(), []]
    assert found.token_ids_logprobs_idx == [[1, 2], []]


# -- FlashInfer's slots ------------------------------------------------------------------


class Translator:
    """As SGLang's of a plain pool: names the slots of rows by a table."""

    is_translating = False

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self.req_to_token = req_to_token


class FlashInfer:
    """Stands for SGLang's backend: gives a wrapper the slots of a step's rows."""

    heeds = True

    def __init__(self, runner: Any, **_: Any) -> None:
        self._table = runner.table
        self.kv_index_translator = runner.translator
        self.indices_updater_decode = SimpleNamespace(req_to_token=runner.table)
        self.decode_cuda_graph_metadata: Any = {}

    def init_forward_metadata(self, batch: Any) -> None:
        assert batch.forward_mode.is_decode()
        assert batch.seq_lens_sum == int(batch.seq_lens.sum())
        table = self.kv_index_translator.req_to_token if self.heeds else self._table
        rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        slots = torch.cat([table[row, :length] for row, length in rows])
        wrapper = SimpleNamespace(_paged_kv_indices_buf=slots)
        self.forward_metadata = SimpleNamespace(decode_wrappers=[wrapper])


def resident(monkeypatch: pytest.MonkeyPatch, backend: type) -> tuple[Any, Any, AttendTable]:
    module = importlib.import_module("sglang.srt.layers.attention.flashinfer_backend")
    monkeypatch.setattr(module, "FlashInferAttnBackend", backend)
    request_table = torch.full((4, 8), 77, dtype=torch.int32)
    runner = SimpleNamespace(table=request_table, translator=Translator(request_table))
    table = AttendTable(
        num_resident=4, num_recent=2, num_dense=6, first_slot=10, max_batch=3, device=CPU,
        longest=8,
    )  # fmt: skip
    return FlashInferResident(runner, table, "pool"), runner, table


def test_flashinfer_reads_our_table_and_sglang_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, 19)
    found, runner, table = resident(monkeypatch, FlashInfer)
    assert found._backend.kv_index_translator.req_to_token is table.slots
    assert runner.translator.req_to_token is runner.table, "prefill goes on with SGLang's"
    assert not table.slots.any(), "what it was shown with is gone"


class Wrapper:
    """FlashInfer's, over a set whose attention is known; its log-sum-exp is to the base 2."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._found = out, lse / math.log(2.0)

    def forward_return_lse(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._found


def test_what_the_engine_attended_to_is_merged_with_what_flashinfer_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assume(monkeypatch, 19)
    found, _, _ = resident(monkeypatch, FlashInfer)
    size, heads, dim = 2, 4, 8
    query, keys, values = torch.randn(size, heads, dim), *torch.randn(2, heads, 12, dim)
    logits = torch.einsum("bhd,hkd->bhk", query, keys)

    def attention(some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = logits[..., some].softmax(-1)
        out = torch.einsum("bhk,hkd->bhd", weights, values[:, some])
        return out, logits[..., some].logsumexp(-1)

    rest_out, rest_lse = attention(slice(5, 12))
    rest = torch.cat((rest_out, rest_lse[..., None]), -1)
    rest[1, :, -1], rest[1, :, :-1] = float("-inf"), float("nan")  # nothing of the second request
    written: list[Any] = []
    pool = SimpleNamespace(
        get_kv_buffer=lambda _layer: None, set_kv_buffer=lambda *given: written.append(given)
    )
    found._pool = pool
    found._backend._kv_write_scales = lambda _layer: (None, None)
    found._backend._get_wrapper_idx = lambda _layer: 0
    found._backend.forward_metadata = SimpleNamespace(
        decode_wrappers=[Wrapper(*attention(slice(0, 5)))]
    )
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, head_dim=dim, scaling=1.0, logit_cap=0.0,
        k_scale_float=None, v_scale_float=None,
    )  # fmt: skip
    out = found.attend(
        query, query, query, layer, SimpleNamespace(out_cache_loc=None), True,
        with_samples=False, rest=rest,
    ).view(size, heads, dim)  # fmt: skip
    torch.testing.assert_close(out[0], attention(slice(0, 12))[0][0])
    torch.testing.assert_close(out[1], attention(slice(0, 5))[0][1])
    assert len(written) == 1


def test_what_is_attended_to_as_a_whole_is_planned_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sizes FlashInfer's list of slots by lengths on the host: a kernel fills it."""
    found, runner, table = resident(monkeypatch, FlashInfer)
    rows, lengths = torch.tensor([2, 1, 3]), torch.tensor([7, 8, 5])
    batch = SimpleNamespace(
        batch_size=3, seq_lens_cpu=lengths, forward_mode=ForwardMode.DECODE, out_cache_loc=None,
        positions=None,
    )  # fmt: skip
    for whole, count in ((None, 6 + 6 + 5), (torch.tensor([False, True, False]), 6 + 8 + 5)):
        table.load(rows, lengths, runner.table, 6)
        if whole is not None:
            table.attend_whole(whole, rows, lengths, runner.table)
        found.plan(batch, in_capture=False, in_graph=False, kind=DecodeKind.SELECTING)
        wrapper = found._backend.forward_metadata.decode_wrappers[0]
        assert len(wrapper._paged_kv_indices_buf) == count


def test_a_backend_that_does_not_heed_our_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, 23)
    deaf = type("Deaf", (FlashInfer,), {"heeds": False})
    with pytest.raises(ContractError, match=r"gave FlashInfer the slots \[77.*sglang==0\.5\.17"):
        resident(monkeypatch, deaf)


def test_older_versions_read_the_table_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, 18)
    found, runner, table = resident(monkeypatch, FlashInfer)
    assert found._backend.indices_updater_decode.req_to_token is table.slots
    assert found._backend.kv_index_translator is runner.translator


def test_a_pool_that_moves_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, 22)
    monkeypatch.setattr(Translator, "is_translating", True)
    with pytest.raises(ContractError, match="without --enable-unified-memory"):
        resident(monkeypatch, FlashInfer)


# -- the key of SGLang's first request ---------------------------------------------------


def test_older_versions_take_the_key_from_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assume(monkeypatch, 19)
    given = SimpleNamespace(api_key=None, port=30000)
    found = sglang_versions.with_key(lambda args: (args.api_key, args.port), given, "secret")
    assert found == ("secret", 30000)
    assert given.api_key is None


def test_newer_ones_take_it_from_their_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the handlers of requests, in other threads, see nothing."""
    assume(monkeypatch, 20)
    server = importlib.import_module("sglang.srt.entrypoints.http_server")
    bag = SimpleNamespace(api_key=None, skip_tokenizer_init=False)
    monkeypatch.setattr(server, "get_serving", lambda: bag, raising=False)
    original = server.get_serving
    elsewhere: list[Any] = []

    def send(_args: Any) -> Any:
        other = threading.Thread(target=lambda: elsewhere.append(server.get_serving().api_key))
        other.start()
        other.join()
        return server.get_serving().api_key, server.get_serving().skip_tokenizer_init

    assert sglang_versions.with_key(send, None, "secret") == ("secret", False)
    assert elsewhere == [None]
    assert server.get_serving is original

    def fails(_args: Any) -> None:
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        sglang_versions.with_key(fails, None, "secret")
    assert server.get_serving is original
