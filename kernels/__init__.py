# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions; they know nothing of requests, ranks or SGLang.

Every module validates its arguments and dispatches by device: to
``reference`` (plain torch) or to ``triton_ops``, where the operation exists
there. Both have the signature of the public function.
"""
