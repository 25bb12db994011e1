"""Pictures in Dagster's metadata: PNG files inside Markdown, drawn by matplotlib.

Not here: what is drawn (each asset's own module).
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sr_assets.adapters.published.reading import Rows


def daily_chart(days: Rows) -> str:
    """Return, as Markdown, a chart of availability in percent by day, of rows `by="day"`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    date, percent = days.columns.index("date"), days.columns.index("availability_percent")
    shown = [(str(row[date]), row[percent]) for row in days.values if row[percent] is not None]
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([label for label, _ in shown], [value for _, value in shown], marker="o", linewidth=1.5)
    axes.set_ylabel("availability, %")
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.grid(visible=True, alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=80)
    return f"![availability by day](data:image/png;base64,{base64.b64encode(image.getvalue()).decode()})"
