# SPDX-License-Identifier: Apache-2.0
"""Whether the model goes on as dense does."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.server.quality.samples import Sample

from .base import Measure, Task, TaskInputs
from .perplexity import windows


class Continuation(Task):
    """Long-form continuation: dense writes it greedily, a policy is asked at each token.

    The policy decodes dense's tokens (forced) and says which one it would have taken. Up to the
    first difference that is its own greedy continuation; after it, free running would compare
    two different texts, forcing keeps comparing the same.
    """

    name = "continuation"
    title = "Continuation"
    definition = (
        "Dense continues real text greedily; counted are the tokens that a policy, given dense's "
        "text so far, would have chosen too, and where it first would not."
    )
    source = "this project"
    measure: ClassVar[Measure] = "agreement"

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        return [
            Sample(
                name=name,
                mode="continue",
                context_ids=ids,
                num_new_tokens=inputs.num_forced_tokens,
                notes={"tokens": inputs.context_tokens},
            )
            for name, ids in windows(inputs, inputs.context_tokens)
        ]
