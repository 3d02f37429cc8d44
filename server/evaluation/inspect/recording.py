# SPDX-License-Identifier: Apache-2.0
"""What the probes of both ranks wrote about one request, put together, and shown as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import TandemKVError

_DATA = "@@DATA@@"


class RecordingError(TandemKVError):
    """The probes' files do not describe one request."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One request, step by step.

    Sets of tokens are bitmaps in base64, position p in bit ``p % 8`` of byte ``p // 8``.
    """

    lengths: list[int]
    """Tokens of the request in each recorded step, ascending."""
    layers: list[int]
    """The layers in which the policy selects."""
    num_heads: int
    """KV heads."""
    attended: list[list[list[str]]]
    """``[step][layer][head]``: what was attended to, the recent tokens included."""
    selected: list[list[list[str] | None]]
    """``[step][layer][head]``: what the policy chose in that step, None where it chose nothing."""
    mass: list[list[list[float]]]
    oracle_mass: list[list[list[float]]]
    """``[step][layer][head]``: share of the true softmax mass that was attended to, and the most
    that as many tokens can have."""


def read_recording(attention_file: Path, selection_file: Path) -> Recording:
    """Read what `AttentionProbe` and `SelectionProbe` wrote.

    Raises `RecordingError` if there is nothing in them, or more than one request.
    """
    attention = list(_lines(attention_file))
    if not attention:
        raise RecordingError(
            "no step was sparse: the whole context was resident, or the request ended at once; "
            "give a longer prompt or a smaller --budget-tokens"
        )
    if len({(line["row"], line["generation"]) for line in attention}) != 1:
        raise RecordingError("the recording holds more than one request")
    if "attended_bits" not in attention[0]:
        raise RecordingError("the recording has no token sets; set TANDEMKV_PROBE_DETAIL=1")
    by_step = {(line["length"], line["layer"]): line for line in attention}
    chosen = {(line["length"], line["layer"]): line for line in _lines(selection_file)}
    lengths, layers = (sorted(set(values)) for values in zip(*by_step, strict=True))
    missing = [(n, layer) for n in lengths for layer in layers if (n, layer) not in by_step]
    if missing:
        raise RecordingError(f"the recording lacks {len(missing)} steps, the first {missing[0]}")

    def table(key: str) -> list[list[Any]]:
        return [[by_step[length, layer][key] for layer in layers] for length in lengths]

    return Recording(
        lengths=lengths,
        layers=layers,
        num_heads=len(attention[0]["mass"]),
        attended=table("attended_bits"),
        selected=[
            [chosen.get((length, layer), {}).get("selected_bits") for layer in layers]
            for length in lengths
        ],
        mass=table("mass"),
        oracle_mass=table("oracle_mass"),
    )


def _lines(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def make_page(
    recording: Recording, *, tokens: Sequence[str], prompt_tokens: int, facts: Mapping[str, str]
) -> str:
    """Return the HTML page. It loads nothing and runs from a file.

    `tokens` has the text of every token, the `prompt_tokens` of the prompt first; `facts` are shown
    under the title. Raises `ValueError` if there are fewer tokens than the recording speaks of.
    """
    if len(tokens) < recording.lengths[-1]:
        raise ValueError(f"{len(tokens)} tokens, but steps of {recording.lengths[-1]}")
    data = {
        "facts": dict(facts),
        "tokens": list(tokens[: recording.lengths[-1]]),
        "prompt": prompt_tokens,
        "lengths": recording.lengths,
        "layers": recording.layers,
        "heads": recording.num_heads,
        "attended": recording.attended,
        "selected": recording.selected,
        "mass": _rounded(recording.mass),
        "oracle": _rounded(recording.oracle_mass),
    }
    # Nothing of the prompt may end the element that it is in.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split(_DATA)
    return before + text + after


def _rounded(values: list[list[list[float]]]) -> list[list[list[float]]]:
    return [[[round(x, 4) for x in heads] for heads in layers] for layers in values]
