# SPDX-License-Identifier: Apache-2.0
"""The page: a template with everything in it, and the recording as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files

from .recording import Recording

_DATA = "@@DATA@@"


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
