# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions; they know nothing of requests, ranks or SGLang.

Every function checks its arguments. On a GPU it then calls the function of its name in
``triton_ops``, if there is one; else it goes on in plain torch, which kernels are compared with.

What holds for every operation, unless its docstring says otherwise:

- `ValueError` is raised if a shape, dtype, device or number differs from what the docstring says.
- On a GPU it is one launch on the current stream: asynchronous, with no wait for the device, safe
  in CUDA graphs. What tensors hold there (positions, slots, rows) is not checked; on a CPU an index
  out of range is an `IndexError`, a `RuntimeError` or, where it is looked for, a `ValueError`.
"""
