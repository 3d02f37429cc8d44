# SPDX-License-Identifier: Apache-2.0
"""Draw ``token_path.svg``: one decode step on both sides of a link.

``python docs/figures/token_path.py`` writes the file beside this one. Text and geometry are plain
data below, so that a change of the design is a change of a few lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, TOP, ROW = 1000, 96, 62
LEFT, RIGHT, BOX = 24, 612, 364
MIDDLE = (LEFT + BOX + RIGHT) / 2
INK, PAPER, LINE = "#1b1f24", "#ffffff", "#8b949e"
FORWARD, ENGINE, CROSS = "#ddeeff", "#fff1d6", "#0b5cad"


@dataclass(frozen=True)
class Box:
    """Work of one side: first row, number of rows, lines of text."""

    row: float
    rows: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Arrow:
    """What crosses the link in a row; `to_engine` says which way."""

    row: float
    text: str
    to_engine: bool = True


HEADS = (
    (LEFT + BOX / 2, "Inference rank: SGLang's forward pass", "reads resident set, ring, samples"),
    (MIDDLE, "Link", "a graph's edge, or a flag"),
    (RIGHT + BOX / 2, "Cache rank: the engine", "has all K/V, key index, mirror"),
)
INFERENCE = (
    Box(0, 0.8, ("before the graph: rows, lengths, slot tables,", "what each request attends to")),
    Box(1, 0.8, ("entry of layer l-1",)),
    Box(2, 1.8, ("attention and MLP of layer l-1", "(the engine works meanwhile)")),
    Box(4, 0.8, ("attention of layer l waits here, if at all",)),
    Box(
        5,
        0.8,
        ("attends to resident set, ring and samples;", "K, V of the new token are in the pool"),
    ),
    Box(6, 0.8, ("after the last layer: logits, next token",)),
)
CACHE = (
    Box(0, 0.8, ("loads rows and lengths of step n",)),
    Box(
        1,
        3.8,
        (
            "predicts the query of layer l: norm, W_q, RoPE",
            "scores all keys of l in the key index",
            "chooses K tokens for each KV head",
            "compares with the mirror; least recently used go",
            "copies missing K/V rows into the resident set",
        ),
    ),
    Box(5, 0.8, ("takes the new key into the index",)),
    Box(6, 0.8, ("late layers; copies the books of changed rows",)),
)
ARROWS = (
    Arrow(0.4, "step n: rows, lengths"),
    Arrow(1.4, "residual stream [B, hidden]"),
    Arrow(4.4, "layer l is ready", to_engine=False),
    Arrow(5.4, "layer l has attended"),
    Arrow(6.4, "step n is finished", to_engine=False),
)


def _text(
    x: float, y: float, text: str, *, size: int = 13, fill: str = INK, weight: int = 400
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} rx="6" fill="{colour}" stroke="{LINE}"/>'


def _box(left: float, box: Box, colour: str) -> list[str]:
    y, height = TOP + box.row * ROW, box.rows * ROW
    first = y + height / 2 - (len(box.lines) - 1) * 9.5 + 4.5
    lines = (_text(left + BOX / 2, first + i * 19, line) for i, line in enumerate(box.lines))
    return [_rect(left, y, BOX, height, colour), *lines]


def _arrow(arrow: Arrow) -> list[str]:
    y = TOP + arrow.row * ROW
    start, end = (LEFT + BOX, RIGHT) if arrow.to_engine else (RIGHT, LEFT + BOX)
    tip = end - 9 if arrow.to_engine else end + 9
    head = f"{end},{y} {tip},{y - 5} {tip},{y + 5}"
    return [
        f'<line x1="{start}" y1="{y}" x2="{tip}" y2="{y}" stroke="{CROSS}" stroke-width="2"/>',
        f'<polygon points="{head}" fill="{CROSS}"/>',
        _text(MIDDLE, y - 8, arrow.text, fill=CROSS),
    ]


def draw() -> str:
    """Return the picture as SVG text."""
    height = TOP + 7 * ROW + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
    ]
    for x, title, below in HEADS:
        parts += [_text(x, 30, title, size=16, weight=700), _text(x, 54, below)]
    for left, boxes, colour in ((LEFT, INFERENCE, FORWARD), (RIGHT, CACHE, ENGINE)):
        for box in boxes:
            parts += _box(left, box, colour)
    for arrow in ARROWS:
        parts += _arrow(arrow)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
