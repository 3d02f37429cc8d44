# SPDX-License-Identifier: Apache-2.0
"""Processes of a launch: their command lines, how they are watched, and how all end."""
