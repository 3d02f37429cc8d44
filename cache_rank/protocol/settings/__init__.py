# SPDX-License-Identifier: Apache-2.0
"""Settings that both ranks agree on, and where the cache rank works."""
