# SPDX-License-Identifier: Apache-2.0
"""``tandemkv calibrate``: run a model over text once, and write down what its attention shares."""
