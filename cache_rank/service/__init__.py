# SPDX-License-Identifier: Apache-2.0
"""The engine in a process of its own, in memory that the inference rank maps as well."""
