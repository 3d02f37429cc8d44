# SPDX-License-Identifier: Apache-2.0
"""Views for kernels that move bits and do not calculate."""

import torch

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the same size, so that NaN payloads survive.

    Parameters
    ----------
    tensor : torch.Tensor
        Any shape and strides, of a dtype of 1, 2 or 4 bytes.

    Returns
    -------
    torch.Tensor
        The same memory, shape and strides.
    """
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])
