# SPDX-License-Identifier: Apache-2.0
"""Where the plugin reaches into SGLang: contract, versions, hooks, pool, processes."""
