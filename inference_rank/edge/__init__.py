# SPDX-License-Identifier: Apache-2.0
"""What stands before SGLang's routes: bounds, checks, keys. Only `install` touches SGLang."""
