# SPDX-License-Identifier: Apache-2.0
"""Difference between a selection and the resident set; called by the cache rank.

The mirror says which token sits in which resident slot. It is changed here and
nowhere else, so the cache rank always knows it.
"""

import torch

from tandemkv.kernels.check import INT32, INTS, Dims, check_int, fail
from tandemkv.kernels.dispatch import resolve


def mirror_diff(
    selected: torch.Tensor,
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    *,
    step: int | torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    hi: torch.Tensor,
    lo: int,
    fetch_cap: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide what to fetch into which resident slots, and update the mirror.

    Per head: selected positions that are resident are touched. The others, best
    first, take the empty slots in ascending order (until `num_target` slots are
    filled), then the least recently used slot that is neither protected nor
    touched in this step (of several, the lowest). If fewer than `num_target`
    slots are filled after that, empty slots take the highest positions of
    ``[lo, hi)`` that are not resident. At most `fetch_cap` slots are written;
    each write counts as a touch.

    Parameters
    ----------
    selected : torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32. Logical positions, best first;
        negative is padding, of a repeated position the first one counts.
    resident_pos : torch.Tensor
        ``[num_reqs, num_kv_heads, num_resident]``, int32. Position in each
        resident slot, ``-1`` if empty. Updated in place.
    last_used : torch.Tensor
        As `resident_pos`, int32 or int64. Step of the last touch; start it
        below the first step (``-1``). Updated in place.
    step : int or torch.Tensor
        The step, or a tensor ``[]`` or ``[num_reqs]`` of int32 or int64 on the
        device of the others. Not below any `last_used`.
    num_protected : int
        Slots ``[0, num_protected)`` (the sink) are filled when empty, never
        overwritten.
    num_target : torch.Tensor
        ``[num_reqs]``, int32 or int64. How many slots have to be filled:
        ``min(num_resident, candidates)``, candidates being all positions that
        may be resident. Reached over several steps if `fetch_cap` is less.
    hi : torch.Tensor
        ``[num_reqs]``, int32 or int64. End of the positions used for filling.
    lo : int
        Their begin.
    fetch_cap : int
        Slots written per head at most.

    Returns
    -------
    fetch_pos : torch.Tensor
        ``[num_reqs, num_kv_heads, fetch_cap]``, int32. Logical positions to
        fetch: selected ones best first, then fillers from the highest; padded
        with ``-1`` at the end.
    fetch_slot : torch.Tensor
        Likewise: the resident slot each goes to.

    Raises
    ------
    ValueError
        If an argument differs from the above.

    Notes
    -----
    Invariants, given that they hold before the call: no position is twice in a
    head; filled slots are a prefix (no holes); and all heads of a request have
    equally many filled slots, as long as `num_target` is at most ``hi - lo`` plus the
    number of resident positions outside ``[lo, hi)``.
    """
    dims = Dims()
    dims.check("selected", selected, "num_reqs num_kv_heads k", INT32)
    dims.check("resident_pos", resident_pos, "num_reqs num_kv_heads num_resident", INT32)
    dims.check("last_used", last_used, "num_reqs num_kv_heads num_resident", INTS)
    dims.check("num_target", num_target, "num_reqs", INTS)
    dims.check("hi", hi, "num_reqs", INTS)
    if isinstance(step, torch.Tensor):
        if step.dim() > 1:
            fail("step.shape", tuple(step.shape), "[] or [num_reqs]")
        dims.check("step", step, "num_reqs" if step.dim() else "", INTS)
    check_int("num_protected", num_protected, minimum=0)
    check_int("lo", lo, minimum=0)
    check_int("fetch_cap", fetch_cap, minimum=0)
    run = resolve("mirror", "mirror_diff", selected.device)
    fetch: tuple[torch.Tensor, torch.Tensor] = run(
        selected,
        resident_pos,
        last_used,
        step=step,
        num_protected=num_protected,
        num_target=num_target,
        hi=hi,
        lo=lo,
        fetch_cap=fetch_cap,
    )
    return fetch
