# SPDX-License-Identifier: Apache-2.0
"""Memory that several processes map, and who holds its descriptors."""
