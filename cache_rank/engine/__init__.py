# SPDX-License-Identifier: Apache-2.0
"""The engine: keeps resident sets fresh, wherever it runs; links lead to it."""
