# SPDX-License-Identifier: Apache-2.0
"""What both ranks know of a model: its shape, attention and query projections."""
