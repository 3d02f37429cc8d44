# SPDX-License-Identifier: Apache-2.0
"""The cache rank's selection inside the inference rank: nothing crosses a link."""
