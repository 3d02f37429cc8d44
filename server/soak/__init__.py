# SPDX-License-Identifier: Apache-2.0
"""``tandemkv soak``: mixed load and faults for as long as asked, and then a verdict."""
