# SPDX-License-Identifier: Apache-2.0
"""Several needles under one key."""

from __future__ import annotations

from random import Random

from . import haystack
from .needles import Hidden, NeedleTask

NUM_VALUES = 4


class NiahMultiValue(NeedleTask):
    """RULER's ``niah_multivalue``: four numbers under the same key, all of them asked for."""

    name = "niah_multi_value"
    title = "Needle, multi-value"
    definition = "Four numbers are hidden in prose under one key; all of them are asked for."
    num_new_tokens = 64

    def hide(self, generator: Random) -> Hidden:
        """See `NeedleTask.hide`."""
        (key,), values = haystack.keys(generator, 1), haystack.numbers(generator, NUM_VALUES)
        return Hidden(key, values, [haystack.needle(key, value) for value in values])
