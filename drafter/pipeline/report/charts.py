"""Charts as inline SVG: colours come from the page's style sheet, so that they fit light and dark mode."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TypeGuard

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 12, 42
POINTS = 400  # of a line: more would not be visible on a screen
LARGEST, SMALLEST = 1e100, 1e-11  # of a value and of an axis' span; beyond them arithmetic and rounding fail

Points = Sequence[tuple[float, float]]


def lines(title: str, series: Mapping[str, Points], x_label: str, y_label: str, from_zero: bool = False) -> str:
    """One line per series, of its finite points; "" without any."""
    drawn = {name: [point for point in points if all(map(drawable, point))] for name, points in series.items()}
    series = {name: thin(points) for name, points in drawn.items() if points}
    if not series:
        return ""
    everything = [point for points in series.values() for point in points]
    x_ticks = ticks(*extent([x for x, _ in everything]))
    y_ticks = ticks(*extent([y for _, y in everything] + ([0.0] if from_zero else [])))
    x_place, y_place = _scales(x_ticks, y_ticks)
    marks = []
    for index, (name, points) in enumerate(series.items()):
        path = " ".join(f"{x_place(x):.1f},{y_place(y):.1f}" for x, y in points)
        last = points[-1]
        marks.append(f'<polyline class="line c{index % 4}" points="{path}"/>')
        end = f'cx="{x_place(last[0]):.1f}" cy="{y_place(last[1]):.1f}"'
        tip = f"<title>{escape(name)}: {number(last[1])}</title>"
        marks.append(f'<circle class="dot c{index % 4}" {end} r="3">{tip}</circle>')
    return figure(title, list(series), _axes(x_ticks, y_ticks, x_place, y_place, x_label, y_label) + "".join(marks))


def bars(
    title: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], x_label: str, y_label: str
) -> str:
    """Bars from zero, one group per label; "" without any value."""
    values = [value for heights in series.values() for value in heights if drawable(value)]
    if not values:
        return ""
    y_ticks = ticks(0, max(values) or 1)
    _, y_place = _scales([0, 1], y_ticks)
    group = (WIDTH - LEFT - RIGHT) / len(labels)
    width = group * 0.8 / len(series)
    marks = []
    for index, (name, heights) in enumerate(series.items()):
        for place, height in enumerate(heights):
            if not drawable(height):
                continue
            x, y = LEFT + group * (place + 0.1) + width * index, y_place(height)
            tip = f"<title>{escape(name)}, {escape(labels[place])}: {number(height)}</title>"
            marks.append(
                f'<rect class="bar c{index % 4}" x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" '
                f'height="{max(HEIGHT - BOTTOM - y, 0):.1f}">{tip}</rect>'
            )
    every = math.ceil(len(labels) / 10)
    names = "".join(
        _text(label, LEFT + group * (place + 0.5), HEIGHT - BOTTOM + 15)
        for place, label in enumerate(labels)
        if place % every == 0
    )
    return figure(title, list(series), _axes([], y_ticks, None, y_place, x_label, y_label) + names + "".join(marks))


def histogram(values: Sequence[float], count: int = 20) -> tuple[list[str], list[int]]:
    """Labels (lower edges) and counts of equal bins from 0 to the largest value."""
    width = max(max(values, default=0) / count, 1)
    heights = [0] * count
    for value in values:
        heights[min(int(value / width), count - 1)] += 1
    return [number(round(width * place)) for place in range(count)], heights


def figure(title: str, names: list[str], drawing: str) -> str:
    keys = "".join(f'<span class="key"><i class="c{i % 4}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    legend = f'<div class="legend">{keys}</div>' if len(names) > 1 else ""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{drawing}</svg></figure>'
    )


def _scales(x_ticks: Sequence[float], y_ticks: Sequence[float]) -> tuple[Callable, Callable]:
    def scale(ticks_: Sequence[float], start: float, end: float) -> Callable[[float], float]:
        span = (ticks_[-1] - ticks_[0]) or 1
        return lambda value: start + (value - ticks_[0]) / span * (end - start)

    return scale(x_ticks, LEFT, WIDTH - RIGHT), scale(y_ticks, HEIGHT - BOTTOM, TOP)


def _axes(x_ticks, y_ticks, x_place, y_place, x_label: str, y_label: str) -> str:
    parts = []
    for value in y_ticks:
        y = y_place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{number(value)}</text>')
    parts += [_text(number(value), x_place(value), HEIGHT - BOTTOM + 15) for value in x_ticks]
    parts.append(_text(x_label, (LEFT + WIDTH) / 2, HEIGHT - 6, "name"))
    turned = f"translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
    parts.append(f'<text class="name" text-anchor="middle" transform="{turned}">{escape(y_label)}</text>')
    return "".join(parts)


def _text(text: str, x: float, y: float, kind: str = "tick") -> str:
    return f'<text class="{kind}" text-anchor="middle" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover `low` to `high`."""
    if high - low < SMALLEST:
        high = low + (abs(low) if abs(low) > SMALLEST else 1)
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(place * step, 12) for place in range(first, last + 1)]


def drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) < LARGEST  # also False for NaN


def extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def thin(points: Points) -> Points:
    """At most POINTS of the points, including the last one."""
    step = max(1, math.ceil(len(points) / POINTS))
    return [*points[:-1:step], points[-1]]


def number(value: float) -> str:
    """A number as on an axis: 12k, 3.4M, 0.05."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.4g}"
