"""Pictures in Dagster's metadata: PNG files inside Markdown, drawn by matplotlib.

Not here: what is drawn (each asset's own module).
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def line_chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """Return, as Markdown, a chart of lines by their labels; a line's points are what they are of, and a number."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        # A label that begins with an underscore would be left out.
        axes.plot(
            [at for at, _ in points], [number for _, number in points], marker="o", linewidth=1.5, label=f"{label} "
        )
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.grid(visible=True, alpha=0.3)
    if any(lines):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=80)
    return f"![{title}](data:image/png;base64,{base64.b64encode(image.getvalue()).decode()})"
