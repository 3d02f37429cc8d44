# SPDX-License-Identifier: Apache-2.0
"""Model adapters: predict a layer's query from an earlier residual stream."""
