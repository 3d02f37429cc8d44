"""Stands in for the CPU build of sgl_kernel, which is not on the package index.

SGLang imports a few CPU operators by name when it starts. Serving plain text calls one of
them; the others raise when called. ``torch.ops.sgl_kernel`` stays empty on purpose: SGLang
then takes its layers' native torch path.
"""

__version__ = "0.0.0+tandemkv.cpu"
__path__ = []


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, _len):
    """Write each request's new slots into its row of the request table."""
    offset = 0
    for row, first, last in zip(
        req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True
    ):
        count = last - first
        if count > 0:
            slots = out_cache_loc[offset : offset + count]
            req_to_token[row, first:last] = slots.to(req_to_token.dtype)
            offset += count


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version here")

    missing.__name__ = name
    return missing
