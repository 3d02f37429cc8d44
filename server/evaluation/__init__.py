# SPDX-License-Identifier: Apache-2.0
"""Measurements: speed, quality, calibration, and what each head attends to."""
