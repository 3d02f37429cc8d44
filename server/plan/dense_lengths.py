# SPDX-License-Identifier: Apache-2.0
"""Up to which lengths `serve` attends to everything, of what `plan` has chosen."""

from __future__ import annotations

from typing import NamedTuple

from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .choose import Choice, break_even_batch_tokens, break_even_tokens
from .placement import PlacementKind
from .shape import ModelShape
from .workload import Workload

_NO_SLOWER = "attend to everything, which is predicted to be no slower there"
_TIMES = (
    "; at this load all do, and the predicted times are those of steps that select: stock SGLang's "
    "are nearer"
)


class DenseText(NamedTuple):
    """Lengths in tokens that are predicted, by name, and a sentence on all of them."""

    break_even: dict[str, int]
    said: str


def dense_lengths(
    selection: SelectionSettings, choice: Choice, shape: ModelShape, load: Workload
) -> DenseText:
    """Return the lengths of a request, and of a step in all, up to which attention is dense.

    As `serve` decides them: given ones are kept, and the others are predicted, but only where the
    model's GPU has the K/V and the policy attends to more with more tokens.
    """
    from tandemkv.cache_rank.protocol.engine import DenseLengths  # with torch

    chosen = None if choice.chosen is None else choice.chosen.placement
    if chosen is None or chosen.kind is not PlacementKind.IN_PROCESS:
        return DenseText({}, "")
    together = selection.dense_batch_tokens
    if selection.dense_tokens is not None or not selection.dense_while_fits:
        each = DenseLengths.of(selection, selection.num_resident).num_dense
        return DenseText({}, _given(each, together or 0, load))
    if selection.declared.keeps_sink_only:
        return DenseText({}, "")
    each = break_even_tokens(shape, load, chosen.tp_size, choice.cost)
    if together is not None:
        said = f"break-even: requests of up to {each} tokens {_NO_SLOWER}"
        asked = _given(0, together, load)
        return DenseText({"tokens": each}, f"{said}; {asked}" if asked else said)
    together = break_even_batch_tokens(shape, load, chosen.tp_size, choice.cost)
    return DenseText(
        {"tokens": each, "batch_tokens": together},
        f"break-even: requests of up to {each} tokens, and steps of no more than {together} in "
        f"all, {_NO_SLOWER}",
    )


def _given(each: int, together: int, load: Workload) -> str:
    """Return what is said of lengths that were asked for; 0: there is none."""
    parts = [f"requests of up to {each} tokens"] if each else []
    parts += [f"steps of no more than {together} in all"] if together else []
    if not parts:
        return ""
    said = f"with the lengths that were given, {' and '.join(parts)} attend to everything"
    is_all = each >= load.context_tokens or together >= load.total_tokens
    return said + (_TIMES if is_all else "")
