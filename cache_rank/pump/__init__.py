# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: carries steps and K/V between two hosts.

On each host a pump meets its rank as the other rank would by link ``shared``: with memory that both
map, flags and announcements. What a rank writes there for the other one, the pump of its host
sends, and the pump of the other host writes it into its own memory before it raises the same flag.
"""
