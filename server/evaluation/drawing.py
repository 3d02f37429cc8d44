# SPDX-License-Identifier: Apache-2.0
"""What all drawings of reports have in common. Needs matplotlib."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError

# No dates and no random ids: equal results give equal files.
_STYLE = {"svg.hashsalt": "tandemkv", "svg.fonttype": "none", "font.size": 9.0}
_METADATA = {"Date": None}


@contextlib.contextmanager
def drawing(extra: str) -> Iterator[type[Any]]:
    """Yield matplotlib's `Figure`, in the style of all drawings.

    Raises `SettingsError`, naming the `extra` to install, if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError(
            f"plotting needs matplotlib: pip install 'tandemkv[{extra}]'"
        ) from error
    with mpl.rc_context(_STYLE):
        yield Figure


def handles_by_label(axes: Iterable[Any]) -> dict[str, Any]:
    """Return what a legend of several panels shows, each name once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        drawn, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    return handles


def save(figure: Any, stem: Path) -> tuple[Path, Path]:
    """Write `stem`.svg and .png; `stem` may end with one of both. Other points are of its name."""
    if stem.suffix in (".svg", ".png"):
        stem = stem.with_suffix("")
    svg, png = (stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png"))
    stem.parent.mkdir(parents=True, exist_ok=True)
    save_svg(figure, svg)
    figure.savefig(png, dpi=160)
    return svg, png


def save_svg(figure: Any, file: Any) -> None:
    """Write a figure as SVG, to a path or a text stream."""
    figure.savefig(file, format="svg", metadata=_METADATA)
