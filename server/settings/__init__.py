# SPDX-License-Identifier: Apache-2.0
"""What a launch is told: settings, their flags and files, and which of them wins."""
