"""Charts and pictures in the metadata of assets: PNG images within Markdown, drawn by matplotlib (extra `charts`)."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.adapters.extras import missing_extra
from sr_assets.adapters.published.status_queries import STEP, RecentNodes
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.topology.graph import Graph, Node

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LONGEST_NAME: Final = 26
#: Inches between the columns and the rows of a graph.
_COLUMN, _ROW = 4.6, 1.0
#: The position of a label on its link.
_LABEL_SHARE: Final = 0.4


def line_chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[str, float]]]) -> dg.MarkdownMetadataValue:
    if find_spec("matplotlib") is None:
        return dg.MetadataValue.md(missing_extra("this chart", "charts"))
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 2.5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        # The trailing space keeps matplotlib from leaving out a label that begins with an underscore.
        axes.plot([at for at, _ in points], [y for _, y in points], marker=".", linewidth=1.5, label=f"{label} ")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(visible=True, alpha=0.3)
    if any(lines):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _image(title, figure)


def nodes_chart(recent: RecentNodes, maintenance: Sequence[tuple[datetime, datetime]]) -> dg.MarkdownMetadataValue:
    """Return a chart of the up and silent nodes of the last day, with shades for outages of sites and for maintenance."""
    if find_spec("matplotlib") is None:
        return dg.MetadataValue.md(missing_extra("this chart", "charts"))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), layout="constrained")
    axes = figure.add_subplot()
    ends = [recent.as_of - STEP * back for back in reversed(range(len(recent.counts)))]
    for label, column, colour in (("up", 0, "tab:green"), ("silent", 1, "tab:orange")):
        values = [counts[column] for counts in recent.counts]
        axes.step([at.timestamp() for at in ends], values, where="post", color=colour, linewidth=1.5, label=label)
    shown = set()
    for label, begin, end, colour in [
        *(("maintenance", *span, "tab:blue") for span in maintenance),
        *(shade for outage in recent.outages for shade in _outage_shades(outage, recent.as_of)),
    ]:
        if max(begin, ends[0]) < end:
            # The label of a second shade would repeat the first one's in the legend.
            text = "" if label in shown else label
            axes.axvspan(
                max(begin, ends[0]).timestamp(), end.timestamp(), color=colour, alpha=0.2, linewidth=0, label=text
            )
            shown.add(label)
    axes.set_xlim(ends[0].timestamp(), ends[-1].timestamp())
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nodes")
    ticks = ends[:: len(ends) // 8]
    axes.set_xticks([at.timestamp() for at in ticks], [f"{at.astimezone(UTC):%H:%M}" for at in ticks])
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _image("nodes of the last day", figure)


def _outage_shades(outage: Mapping[str, Any], as_of: datetime) -> Iterator[tuple[str, datetime, datetime, str]]:
    """Yield the label, begin, end and colour of an outage's phases."""
    end = outage["restored_at"] or as_of
    yield "partial outage", outage["began_at"], outage["dark_at"] or end, "tab:orange"
    if outage["dark_at"]:
        yield "dark site", outage["dark_at"], end, "tab:red"


@lru_cache(maxsize=32)
def graph_picture(graph: Graph) -> dg.MarkdownMetadataValue:
    """Return a graph of streams in columns, from the origins to the last copies.

    The streams of one graph share the picture, because drawing takes a tenth of a second.
    """
    if find_spec("matplotlib") is None:
        return dg.MetadataValue.md(missing_extra("this picture", "charts"))
    from matplotlib.figure import Figure

    positions = _positions(graph)
    right, bottom = (max(axis) for axis in zip(*positions.values(), strict=True))
    figure = Figure(figsize=(right + 2.4, bottom + _ROW))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1.2, right + 1.2), ylim=(bottom + _ROW / 2, -_ROW / 2))
    axes.set_axis_off()
    style: dict[str, Any] = {"ha": "center", "va": "center", "parse_math": False}
    boxes = {}
    for node, position in positions.items():
        text = f"{_short(node.place)}\n{_short(node.stream)}"
        drawn = axes.text(*position, text, fontsize=9, bbox={"boxstyle": "round", "facecolor": "white"}, **style)
        boxes[node] = drawn.get_bbox_patch()
    for edge in graph.edges:
        start, end = positions[edge.origin], positions[edge.copy]
        arrow = {"arrowstyle": "->", "color": edge.colour, "linestyle": "--" if edge.dashed else "-"}
        axes.annotate("", end, start, arrowprops=arrow | {"patchA": boxes[edge.origin], "patchB": boxes[edge.copy]})
        # Near the origin, because several links may end in one stream.
        x, y = (at + (to - at) * _LABEL_SHARE for at, to in zip(start, end, strict=True))
        label = "\n".join(map(_short, edge.label.split("\n")))
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        axes.text(x, y, label, color=edge.colour, fontsize=8, bbox=background, **style)
    return _image("streams", figure)


def _positions(graph: Graph) -> dict[Node, tuple[float, float]]:
    """Return the position of each node in inches: in a column right of its origins, unless its links form a loop."""
    depth = dict.fromkeys(graph.nodes, 0)
    for _ in graph.nodes:
        deeper = {edge.copy: depth[edge.origin] + 1 for edge in graph.edges if depth[edge.copy] <= depth[edge.origin]}
        depth |= {node: column for node, column in deeper.items() if column < len(graph.nodes)}
    columns = defaultdict[int, list["Node"]](list)
    for node, column in depth.items():
        columns[column].append(node)
    return {node: (column * _COLUMN, row * _ROW) for column, nodes in columns.items() for row, node in enumerate(nodes)}


def _short(text: str) -> str:
    plain = visible(text)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 1]}…"


def _image(title: str, figure: Figure) -> dg.MarkdownMetadataValue:
    from PIL import Image

    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    # A palette makes the image a quarter as large; every run stores one.
    Image.open(drawn).convert("RGB").quantize(64).save(image, "png", optimize=True)
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{base64.b64encode(image.getvalue()).decode()})")
