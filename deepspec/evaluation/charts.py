"""Line and bar charts as inline SVG text, without any dependency.

Charts know points, labels and units, not drafts or tasks. Colours come from CSS classes of the page (`s0`..`s7` for
series, `p0`..`p2` for parts of a bar), so that they follow its dark or light scheme; series differ by dash and marker
too, for readers who do not see the colours apart. Numbers show when the pointer rests on a mark (<title>).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from deepspec.evaluation.statistics import Interval

WIDTH = 460
NUM_STYLES = 8
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "1 2", "12 3", "6 2 1 2")
_LETTER = 6.8  # width of one letter at 12 units, on average


class Series(NamedTuple):
    """One line: points (x, y), y None where there is a gap, and an interval for each point or none at all."""

    label: str
    style: int
    points: Sequence[tuple[float, float | None]]
    intervals: Sequence[Interval | None] = ()


class Bar(NamedTuple):
    """One bar made of parts (name, CSS class, length), with an optional interval and marker on the value axis."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    value_text: str
    interval: Interval | None = None
    marker: float | None = None


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers that cover low..high, by steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(12, 2 - math.floor(math.log10(step)))  # twelve would make zeros of tiny steps
    return [round(index * step, digits) for index in range(first, last + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    y_range: Interval | None = None,
    is_share: bool = False,
    is_integer_x: bool = False,
) -> str:
    """Return a line chart.

    Args:
        title: heading, also read aloud by screen readers.
        series: the lines, in legend order.
        x_label: what the horizontal axis shows, with unit.
        y_label: what the vertical axis shows, with unit.
        y_range: ends of the vertical axis; from the data where None.
        is_share: y values are shares of one, shown in per cent.
        is_integer_x: one tick at each whole number (positions).
    """
    xs = [x for line in series for x, y in line.points if y is not None]
    ys = [y for line in series for _, y in line.points if y is not None]
    if not xs:
        return ""
    y_ticks = nice_ticks(*(y_range or (min(ys), max(ys))))
    if is_integer_x:
        x_ticks = [float(x) for x in range(math.floor(min(xs)), math.ceil(max(xs)) + 1)]
        x_low, x_high = x_ticks[0] - 0.3, x_ticks[-1] + 0.3
    else:
        x_ticks = nice_ticks(min(xs), max(xs))
        x_low, x_high = x_ticks[0], x_ticks[-1]
    left, right, top, plot = 58.0, WIDTH - 14.0, 44.0, 210.0
    bottom = top + plot
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place_x(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (right - left)

    def place_y(y: float) -> float:
        return bottom - (min(max(y, y_low), y_high) - y_low) / (y_high - y_low) * plot

    out = [_text(0, 16, title, "title"), _text(0, 33, y_label, "label")]
    for tick in y_ticks:
        out.append(_line(left, place_y(tick), right, place_y(tick), "grid"))
        out.append(_text(left - 7, place_y(tick) + 4, f"{tick:.0%}" if is_share else f"{tick:g}", "tick end"))
    out.append(_line(left, bottom, right, bottom, "axis"))
    for tick in x_ticks:
        out.append(_line(place_x(tick), bottom, place_x(tick), bottom + 4, "axis"))
        out.append(_text(place_x(tick), bottom + 18, f"{tick:,.10g}", "tick middle"))
    out.append(_text((left + right) / 2, bottom + 36, x_label, "label middle"))
    # Lines of different drafts are moved apart a little where whiskers would lie on top of each other.
    for index, line in enumerate(series):
        has_whiskers = any(interval is not None for interval in line.intervals)
        shift = (index - (len(series) - 1) / 2) * 4 if has_whiskers else 0.0
        out.append(_draw_series(line, place_x, place_y, shift, is_share))
    legend, height = _legend([(line.label, f"s{line.style % NUM_STYLES}", line.style) for line in series], bottom + 58)
    return _svg(title, height, [*out, *legend])


def bar_chart(
    title: str,
    bars: Sequence[Bar],
    x_label: str,
    x_max: float,
    reference: tuple[float, str] | None = None,
    legend: Sequence[tuple[str, str]] = (),
    marker_label: str = "",
) -> str:
    """Return horizontal bars that start at zero, each with its name above it.

    Args:
        title: heading.
        bars: the bars from top to bottom.
        x_label: what the axis shows, with unit.
        x_max: largest value of the axis: charts side by side share it, so that their bars compare.
        reference: value and name of a vertical line.
        legend: name and CSS class of the parts.
        marker_label: what the markers show.
    """
    if not bars:
        return ""
    ticks = nice_ticks(0.0, x_max)
    left, right, top, step = 4.0, WIDTH - 60.0, 30.0, 36.0
    bottom = top + step * len(bars) + 4

    def place(value: float) -> float:
        return left + min(max(value, 0.0), ticks[-1]) / ticks[-1] * (right - left)

    out = [_text(0, 16, title, "title")]
    for tick in ticks:
        out.append(_line(place(tick), top, place(tick), bottom, "grid"))
        out.append(_text(place(tick), bottom + 16, f"{tick:g}", "tick" if tick == 0 else "tick middle"))
    if reference is not None:
        out.append(_line(place(reference[0]), top, place(reference[0]), bottom, "reference"))
    for index, bar in enumerate(bars):
        y = top + step * index
        out.append(_text(left + 2, y + 13, bar.label, "name"))
        start = 0.0
        for name, css, length in bar.parts:
            x, width = place(start), place(start + length) - place(start)
            hint = f"<title>{escape(f'{bar.label}: {name} {length:.3g}')}</title>"
            size = f'x="{x:.1f}" y="{y + 17:.1f}" width="{width:.1f}" height="14"'
            out.append(f'<rect class="bar {css}" {size}>{hint}</rect>')
            start += length
        end = start
        if bar.interval is not None:
            low, high = bar.interval
            out += [_line(place(low), y + 24, place(high), y + 24, "whisker")]
            out += [_line(place(x), y + 20, place(x), y + 28, "whisker") for x in (low, high)]
            end = max(end, high)
        if bar.marker is not None:
            out.append(_diamond(place(bar.marker), y + 24, "mark", f"{bar.label}: {marker_label} {bar.marker:.3g}"))
            end = max(end, bar.marker)
        out.append(_text(place(end) + 8, y + 28, bar.value_text, "value"))
    out.append(_line(left, bottom, left, top, "axis"))
    label = f"{x_label}; dashed line: {reference[1]}" if reference else x_label
    out.append(_text(left, bottom + 34, label, "label"))
    items: list[tuple[str, str, int | None]] = [(name, css, None) for name, css in legend]
    if marker_label:
        items.append((marker_label, "mark", None))
    drawn, height = _legend(items, bottom + 56) if items else ([], bottom + 42)
    return _svg(title, height, [*out, *drawn])


def _draw_series(
    line: Series, place_x: Callable[[float], float], place_y: Callable[[float], float], shift: float, is_share: bool
) -> str:
    """One line with gaps where y is None, whiskers, and a marker with its value on every point if there are few."""
    css = f"s{line.style % NUM_STYLES}"
    runs: list[list[str]] = [[]]
    marks: list[str] = []
    has_marks = len(line.points) <= 32
    for index, (x, y) in enumerate(line.points):
        if y is None:
            runs.append([])
            continue
        at_x, at_y = place_x(x) + shift, place_y(y)
        runs[-1].append(f"{at_x:.1f},{at_y:.1f}")
        interval = line.intervals[index] if index < len(line.intervals) else None
        hint = f"{line.label}, {x:g}: {y:.1%}" if is_share else f"{line.label}, {x:g}: {y:.4g}"
        if interval is not None:
            low, high = interval
            marks.append(_line(at_x, place_y(low), at_x, place_y(high), f"error {css}"))
            hint += f" [{low:.1%}, {high:.1%}]" if is_share else f" [{low:.4g}, {high:.4g}]"
        if has_marks:
            marks.append(_marker(line.style, at_x, at_y, css, hint))
    dash = f' stroke-dasharray="{_DASHES[line.style % NUM_STYLES]}"' if line.style % NUM_STYLES else ""
    lines = [f'<polyline class="line {css}"{dash} points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    return "".join([*lines, *marks])


def _legend(items: Sequence[tuple[str, str, int | None]], top: float) -> tuple[list[str], float]:
    """Entries (name, CSS class, line style or None for a filled part) in rows, and the height they end at."""
    out: list[str] = []
    x, y = 4.0, top
    for name, css, style in items:
        width = 40 + _LETTER * len(name)
        if x > 4 and x + width > WIDTH:
            x, y = 4.0, y + 20
        if css == "mark":
            out.append(_diamond(x + 12, y - 4, css, name))
        elif style is None:
            out.append(f'<rect class="bar {css}" x="{x + 4:.1f}" y="{y - 11:.1f}" width="16" height="14"/>')
        else:
            dash = f' stroke-dasharray="{_DASHES[style % NUM_STYLES]}"' if style % NUM_STYLES else ""
            out.append(f'<polyline class="line {css}"{dash} points="{x:.1f},{y - 4:.1f} {x + 24:.1f},{y - 4:.1f}"/>')
            out.append(_marker(style, x + 12, y - 4, css, name))
        out.append(_text(x + 29, y, name, "legend"))
        x += width
    return out, y + 10


def _marker(style: int, x: float, y: float, css: str, hint: str) -> str:
    """A circle, square, triangle, diamond, bar or pentagon-like mark, by style."""
    r = 4.2
    outlines = (
        "",
        f"{x - r:.1f},{y - r:.1f} {x + r:.1f},{y - r:.1f} {x + r:.1f},{y + r:.1f} {x - r:.1f},{y + r:.1f}",
        f"{x:.1f},{y - 5:.1f} {x + 5:.1f},{y + r:.1f} {x - 5:.1f},{y + r:.1f}",
        f"{x:.1f},{y - 5.6:.1f} {x + 5.6:.1f},{y:.1f} {x:.1f},{y + 5.6:.1f} {x - 5.6:.1f},{y:.1f}",
        f"{x - 5:.1f},{y - r:.1f} {x + 5:.1f},{y - r:.1f} {x:.1f},{y + 5:.1f}",
        f"{x - 2:.1f},{y - 6:.1f} {x + 2:.1f},{y - 6:.1f} {x + 2:.1f},{y + 6:.1f} {x - 2:.1f},{y + 6:.1f}",
        f"{x - 6:.1f},{y - 2:.1f} {x + 6:.1f},{y - 2:.1f} {x + 6:.1f},{y + 2:.1f} {x - 6:.1f},{y + 2:.1f}",
        f"{x - r:.1f},{y:.1f} {x + r:.1f},{y - 5:.1f} {x + r:.1f},{y + 5:.1f}",
    )
    outline = outlines[style % NUM_STYLES]
    title = f"<title>{escape(hint)}</title>"
    if not outline:
        return f'<circle class="dot {css}" cx="{x:.1f}" cy="{y:.1f}" r="{r}">{title}</circle>'
    return f'<polygon class="dot {css}" points="{outline}">{title}</polygon>'


def _diamond(x: float, y: float, css: str, hint: str) -> str:
    points = f"{x:.1f},{y - 7:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 7:.1f} {x - 5:.1f},{y:.1f}"
    return f'<polygon class="{css}" points="{points}"><title>{escape(hint)}</title></polygon>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return head + "".join(parts) + "</svg>"
