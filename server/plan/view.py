# SPDX-License-Identifier: Apache-2.0
"""A plan as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from .choose import Choice, PlacementPlan
from .footprint import GIB, USABLE_FRACTION
from .profile import MachineProfile
from .shape import ModelShape
from .workload import Workload


def plan_view(
    choice: Choice, shape: ModelShape, load: Workload, gpu_bytes: int
) -> Iterable[RenderableType]:
    """Yield what a person reads: memory, predicted step, recommendation with its reason."""
    usable = gpu_bytes * USABLE_FRACTION / GIB
    channels = load.index_channels
    of_some = "" if channels is None else f" of {channels} of {shape.head_dim} channels"
    placement, total = Column("placement", style="bold"), Column("total", justify="right")
    memory = Table(
        placement, "GPU", total, "of which", title_justify="left",
        title=f"{escape(shape.name)}, {load.concurrency} x {load.context_tokens} tokens, "
        f"{load.index_dtype} index{of_some}: GiB on each GPU, {usable:.1f} usable",
    )  # fmt: skip
    for plan in choice.plans:
        for index, (role, footprint) in enumerate(plan.memory.roles):
            colour = "green" if footprint.total / GIB <= usable else "red"
            memory.add_row(
                plan.placement.title if index == 0 else "",
                role,
                f"[{colour}]{footprint.total / GIB:.1f}[/]",
                footprint.describe(),
                end_section=index == len(plan.memory.roles) - 1,
            )
    yield memory
    step = Table(
        Column("placement", style="bold"), Column("TPOT", justify="right", style="bold"),
        "of which; the first limits", show_lines=True,
        title="predicted decode step, ms (not a measurement)", title_justify="left",
    )  # fmt: skip
    for plan in choice.plans:
        notes = "" if plan.fits else " [red](does not fit)[/]"
        notes += "" if plan.placement.has_run else " [yellow](never run on GPUs)[/]"
        times = f"{plan.step.tpot_ms:.2f}", plan.step.describe()
        if plan.placement.by_messages:
            times = "-", "not predicted"
        step.add_row(plan.placement.title + notes, *times)
    yield step
    if choice.chosen is None:
        yield Text(f"nothing to recommend: {choice.reason}", style="red")
    else:
        label = "asked for: " if choice.is_asked else "recommended: "
        yield Text.assemble(label, (choice.chosen.placement.title, "bold green"))
        yield Text(choice.reason)


def profile_view(profile: MachineProfile) -> RenderableType:
    """Return what was measured as a table, and which constants are still those of one H200."""
    table = Table(
        title=f"{escape(profile.machine.gpu)}, measured {profile.taken_at}",
        title_justify="left",
        caption=f"still of one H200: {', '.join(profile.kept())}",
        caption_justify="left",
        show_header=False,
    )
    for name, value in profile.rows():
        table.add_row(escape(name), value)
    return table


def plan_json(
    choice: Choice, shape: ModelShape, load: Workload, *, num_gpus: int, gpu_bytes: int
) -> dict[str, Any]:
    """Return the plan as JSON values; bytes and ms, each named so."""
    return {
        "model": asdict(shape),
        "workload": asdict(load),
        "gpus": num_gpus,
        "gpu_bytes": gpu_bytes,
        "usable_fraction": USABLE_FRACTION,
        "placements": [_plan_json(plan) for plan in choice.plans],
        "constants": asdict(choice.cost),
        "recommended": choice.chosen.placement.name if choice.chosen is not None else None,
        "reason": choice.reason,
    }


def _plan_json(plan: PlacementPlan) -> dict[str, Any]:
    placement = plan.placement
    return {
        "name": placement.name,
        "kind": placement.kind.value,
        "tp_size": placement.tp_size,
        "cache_gpus": placement.num_cache_gpus,
        "by_messages": placement.by_messages,
        "serve_flags": list(placement.flags),
        "chosen_by_serve": placement.is_chosen,
        "has_run_on_gpus": placement.has_run,
        "fits": plan.fits,
        "bytes_per_gpu": {
            role: {**asdict(footprint), "total": footprint.total}
            for role, footprint in plan.memory.roles
        },
        "predicted": None
        if placement.by_messages
        else {
            **{name: round(time, 4) for name, time in asdict(plan.step).items()},
            "tpot_ms": round(plan.step.tpot_ms, 4),
            "limited_by": plan.step.limit,
        },
    }
