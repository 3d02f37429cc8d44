# SPDX-License-Identifier: Apache-2.0
"""How much of the true attention falls on what is attended to."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.server.quality.samples import Sample

from .base import Measure, Task, TaskInputs
from .perplexity import windows


class Mass(Task):
    """Recovered attention mass, and recall against the oracle, while real text is forced.

    Measured in float64 on the inference rank, every eighth decode step, in all layers but the
    exact ones: the softmax over all tokens of the true query, averaged over the query heads of a
    KV head. The oracle takes as many tokens as are attended to, those with most mass; recall is
    the share of its tokens that are attended to. Runs on a server of its own: it costs time.
    """

    name = "mass"
    title = "Attention mass"
    definition = (
        "Share of the true softmax mass that falls on attended tokens, and share of the oracle's "
        "tokens that are attended to, while real text is forced through decode."
    )
    source = "this project; recall as in Quest, arXiv:2406.10774"
    measure: ClassVar[Measure] = "mass"

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        length = inputs.context_tokens + inputs.num_forced_tokens
        return [
            Sample(
                name=name,
                mode="probe",
                context_ids=ids[: inputs.context_tokens],
                forced_ids=ids[inputs.context_tokens :],
                num_new_tokens=inputs.num_forced_tokens,
                notes={"tokens": inputs.context_tokens},
            )
            for name, ids in windows(inputs, length)
        ]
