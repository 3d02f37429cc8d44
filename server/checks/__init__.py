# SPDX-License-Identifier: Apache-2.0
"""What is refused before a process is started, and what is to be done instead."""
