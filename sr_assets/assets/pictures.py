"""Pictures in Dagster's metadata, inside Markdown: charts of days as PNG, drawn by matplotlib, charts of hours as SVG.

Not here: what is drawn (each asset's own module).
"""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from sr_assets.adapters.extras import missing_extra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_COLOURS: Final = ("#4c72b0", "#dd8452", "#55a868")
_PLOT_WIDTH, _PLOT_HEIGHT, _TOP = 620, 120, 16


def line_chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """Return, as Markdown, a chart of lines by their labels; a line's points are what they are of, and a number."""
    if find_spec("matplotlib") is None:
        return missing_extra("this chart", "charts")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    figure = Figure(figsize=(8, 2.5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        # A label that begins with an underscore would be left out.
        axes.plot(
            [at for at, _ in points], [number for _, number in points], marker=".", linewidth=1.5, label=f"{label} "
        )
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.grid(visible=True, alpha=0.3)
    if any(lines):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    # With a palette it is a quarter as large; every run leaves one in Dagster's storage.
    Image.open(drawn).convert("RGB").quantize(64).save(image, "png", optimize=True)
    return f"![{title}](data:image/png;base64,{base64.b64encode(image.getvalue()).decode()})"


def hourly_chart(title: str, hours: Sequence[str], lines: Mapping[str, Sequence[int | None]]) -> str:
    """Return, as Markdown, a chart of numbers by hour; None where nothing is known.

    As SVG without a library: each run of a site has such charts, and a run with nothing to do must not pay for matplotlib.
    """
    most = max((number for line in lines.values() for number in line if number is not None), default=0) or 1
    step = _PLOT_WIDTH / max(1, len(hours) - 1)
    parts = [
        _text(0, 10, f"{most:,}"),
        _text(0, _PLOT_HEIGHT + 22, hours[0]),
        _text(_PLOT_WIDTH - 80, _PLOT_HEIGHT + 22, hours[-1]),
    ]
    parts.append(f'<path d="M0 {_TOP}H{_PLOT_WIDTH}M0 {_PLOT_HEIGHT + _TOP}H{_PLOT_WIDTH}" stroke="silver"/>')
    for number, ((name, line), colour) in enumerate(zip(lines.items(), _COLOURS, strict=False)):
        points = [
            (round(at * step), round(_TOP + _PLOT_HEIGHT * (1 - value / most)))
            for at, value in enumerate(line)
            if value is not None
        ]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in points]
        newest = next((value for value in reversed(line) if value is not None), None)
        shown = "" if newest is None else f" {newest:,}"
        parts.append(_text(_PLOT_WIDTH + 12, _TOP + 14 * (number + 1), f"{name}{shown}", colour))
    size = f'width="{_PLOT_WIDTH + 160}" height="{_PLOT_HEIGHT + 30}"'
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()})"


def _text(x: int, y: int, text: str, colour: str = "gray") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(text)}</text>'
