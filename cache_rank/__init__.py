# SPDX-License-Identifier: Apache-2.0
"""The cache rank: the process that holds the whole KV and selects from it."""
