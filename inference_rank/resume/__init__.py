# SPDX-License-Identifier: Apache-2.0
"""Goes on after the loss of the cache rank: lost passes are dropped, and done again."""
