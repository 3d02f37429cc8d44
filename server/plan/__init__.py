# SPDX-License-Identifier: Apache-2.0
"""What fits where, how fast it is likely to be, and which placement to take."""
