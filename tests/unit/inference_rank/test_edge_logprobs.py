# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for log probabilities and end before their first token."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from tandemkv.inference_rank.edge.logprobs import convert_logprob_style, detokenize_logprob_tokens


def state(**lists: list[Any]) -> Any:
    names = ("input_token_logprobs", "output_token_logprobs")
    empty: dict[str, list[Any]] = {
        f"{name}{end}": [] for name in names for end in ("", "_val", "_idx")
    }
    obj = SimpleNamespace(top_logprobs_num=0, token_ids_logprob=None)
    return SimpleNamespace(obj=obj, **empty | lists)


def convert(recv_obj: Any, found: Any) -> dict[str, Any]:
    meta_info: dict[str, Any] = {}
    manager = SimpleNamespace(
        add_logprob_to_meta_info=lambda *args, **more: TokenizerManager.add_logprob_to_meta_info(
            manager, *args, **more
        ),
        detokenize_logprob_tokens=lambda values, ids, _text: list(zip(values, ids, strict=True)),
    )
    original = TokenizerManager.convert_logprob_style
    more = {"finished": True} if "finished" in inspect.signature(original).parameters else {}
    convert_logprob_style(original, manager, meta_info, found, 0, None, False, recv_obj, 0, **more)
    return meta_info


def test_one_without_any_has_none_and_their_number_is_known() -> None:
    meta_info = convert(SimpleNamespace(input_token_logprobs_val=None), state())
    assert meta_info["output_token_logprobs"] == []
    assert meta_info["output_token_logprobs_length"] == 0


def test_others_are_as_sglang_makes_them() -> None:
    recv_obj = SimpleNamespace(
        input_token_logprobs_val=[],
        output_token_logprobs_val=[[-0.5]],
        output_token_logprobs_idx=[[7]],
    )
    meta_info = convert(recv_obj, state())
    assert meta_info["output_token_logprobs"] == [(-0.5, 7)]
    assert meta_info["output_token_logprobs_length"] == 1


def test_a_token_is_decoded_once() -> None:
    asked: list[list[list[int]]] = []

    def batch_decode(ids: list[list[int]]) -> list[str]:
        asked.append(ids)
        return [f"<{token}>" for (token,) in ids]

    manager = SimpleNamespace(tokenizer=SimpleNamespace(batch_decode=batch_decode))
    original = TokenizerManager.detokenize_logprob_tokens
    ids = [10**6, 10**6, 10**6 + 1]
    for _ in range(2):
        found = detokenize_logprob_tokens(original, manager, [-1.0, -2.0, -3.0], ids, True)
        assert found == original(manager, [-1.0, -2.0, -3.0], ids, True)  # type: ignore[arg-type]
    assert [len(part) for part in asked] == [2, 3, 3]
    assert detokenize_logprob_tokens(original, manager, [-1.0], [5], False) == [(-1.0, 5, None)]
