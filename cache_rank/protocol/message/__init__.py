# SPDX-License-Identifier: Apache-2.0
"""Between two hosts: authenticated control over TCP, and the data plane that follows from it."""
