# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions; they know nothing of requests, ranks or SGLang.

Every module validates its arguments and dispatches by device: to ``reference`` (plain torch) or to
``triton_ops``, where the operation exists there. Both have the signature of the public function.

What holds for every operation, unless its docstring says otherwise:

- `ValueError` is raised if a shape, dtype, device or number differs from what the docstring says.
- On a GPU it is one launch on the current stream: asynchronous, with no wait for the device, safe
  in CUDA graphs. What tensors hold there (positions, slots, rows) is not checked; on a CPU an index
  out of range is an `IndexError`.
"""
