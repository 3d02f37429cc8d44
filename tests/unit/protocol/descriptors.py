# SPDX-License-Identifier: Apache-2.0
"""How many descriptors this process has open, which says whether a test left some."""

import gc

import psutil


def open_descriptors() -> int:
    """Count them, once what earlier tests left in cycles is gone.

    Otherwise the collector may close theirs between two counts.
    """
    gc.collect()
    return psutil.Process().num_fds()
