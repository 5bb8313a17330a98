"""A line chart as an SVG document, so that the benchmarks need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 50, 60
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, told apart by all
_STEP = 0.2


def line_chart(
    title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]], top: float = 1.0
) -> str:
    """`series`: name to its (x, y), x above 0 and y not below 0. Log scale for x; y from 0 to `top`, or what is there.

    Raises ValueError if there is no point at all.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("there is no point to plot")
    ticks = sorted({x for x, _ in points})
    low, span = math.log(ticks[0]), math.log(ticks[-1] / ticks[0]) or 1.0
    rows = max(math.ceil(max(top, *(y for _, y in points)) / _STEP - 1e-9), 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / span
        up = y / (rows * _STEP)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 25, title, "start", 15)]
    for row in range(rows + 1):
        _, y = place(ticks[0], row * _STEP)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{row * _STEP:.1f}", "end"))
    for tick in ticks:
        x, y = place(tick, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 5:.1f}" stroke="#333"/>')
        parts.append(_text(x, y + 20, f"{tick:g}", "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 15, x_label, "middle"))
    parts.append(f'<g transform="rotate(-90 18 {_HEIGHT / 2})">{_text(18, _HEIGHT / 2, y_label, "middle")}</g>')
    for index, (name, line) in enumerate(series.items()):
        color = _COLORS[index % len(_COLORS)]
        parts += _line([(*place(x, y), f"{name}, {x:g}: {y:.3g}") for x, y in line], color)
        height = _TOP + 10 + 20 * index
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 15}" y="{height - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 31, height, name, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def _line(points: list[tuple[float, float, str]], color: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>']
    for x, y, label in points:
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{escape(label)}</title></circle>')
    return parts


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
