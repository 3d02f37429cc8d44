# SPDX-License-Identifier: Apache-2.0
"""The acceptance items by name. Each returns ``pass``, ``checks`` and details as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bad_input
import edge
import exact
import fault_matrix
import frames
import life
import mass
import needle
import nothing_lost
import numerics
import outside
import perplexity
import policies
import speed
from workbench import Bench

ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "exact": exact.run,
    "perplexity": perplexity.run,
    "needle": needle.run,
    "mass": mass.run,
    "policies": policies.run,
    "life_cycle": life.run,
    "bad_input": bad_input.run,
    "nothing_lost": nothing_lost.run,
    "nothing_lost_message": nothing_lost.run_message,
    "nothing_lost_shards": nothing_lost.run_shards,
    "fault_matrix": fault_matrix.run,
    "speed": speed.run,
    "outside": outside.run,
    "edge": edge.run,
    "frames": frames.run,
    "numerics": numerics.run,
}
ON_GPUS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "nothing_lost_gpu": nothing_lost.run_gpu,
    "nothing_lost_gpu_message": nothing_lost.run_gpu_message,
}
"""Items that run only if they are named."""
