# SPDX-License-Identifier: Apache-2.0
"""One needle among others that look like it."""

from __future__ import annotations

from random import Random

from . import haystack
from .needles import Hidden, NeedleTask

NUM_KEYS = 4


class NiahMultiKey(NeedleTask):
    """RULER's ``niah_multikey_1``: four keys with a number each, one of them asked for."""

    name = "niah_multi_key"
    title = "Needle, multi-key"
    definition = "Four numbers are hidden in prose under different keys; one of them is asked for."
    num_new_tokens = 16

    def hide(self, generator: Random) -> Hidden:
        """See `NeedleTask.hide`."""
        keys, values = haystack.keys(generator, NUM_KEYS), haystack.numbers(generator, NUM_KEYS)
        needles = [haystack.needle(k, v) for k, v in zip(keys, values, strict=True)]
        return Hidden(keys[0], values[:1], needles)
