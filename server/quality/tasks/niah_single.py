# SPDX-License-Identifier: Apache-2.0
"""One needle."""

from __future__ import annotations

from random import Random

from . import haystack
from .needles import Hidden, NeedleTask


class NiahSingle(NeedleTask):
    """RULER's ``niah_single_2``: one key, one number, hidden in prose."""

    name = "niah_single"
    title = "Needle, single"
    definition = "One number of seven digits is hidden in prose under a key, and asked for."
    num_new_tokens = 16

    def hide(self, generator: Random) -> Hidden:
        """See `NeedleTask.hide`."""
        (key,), (value,) = haystack.keys(generator, 1), haystack.numbers(generator, 1)
        return Hidden(key, [value], [haystack.needle(key, value)])
