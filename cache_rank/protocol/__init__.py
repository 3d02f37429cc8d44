# SPDX-License-Identifier: Apache-2.0
"""The contract between the ranks: messages, sizes, shared memory. The only part others import."""
