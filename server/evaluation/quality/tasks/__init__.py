# SPDX-License-Identifier: Apache-2.0
"""Tasks: what is asked, how it is scored, and where the definition comes from."""
