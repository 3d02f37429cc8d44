# SPDX-License-Identifier: Apache-2.0
"""How the forward pass and the engine meet: in one process, or in memory that two map."""
