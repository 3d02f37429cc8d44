# SPDX-License-Identifier: Apache-2.0
"""Query projections read from a checkpoint's files, quantised or not."""
