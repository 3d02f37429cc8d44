# SPDX-License-Identifier: Apache-2.0
"""What is measured about a model before it is served: the files, and how a rank reads them."""
