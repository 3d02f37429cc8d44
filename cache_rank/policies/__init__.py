# SPDX-License-Identifier: Apache-2.0
"""Policies: who is attended to. One file per method; `registry` finds them by name."""
