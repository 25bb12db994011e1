"""Charts and pictures in the metadata of assets: PNG images within Markdown, drawn by matplotlib (extra `charts`)."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.adapters.extras import missing_extra
from sr_assets.domain.topology.graph import Graph, Node

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LONGEST_NAME: Final = 26
#: Inches between the columns and the rows of a graph.
_COLUMN, _ROW = 4.6, 1.0
#: The position of a label on its link.
_LABEL_SHARE: Final = 0.4


def line_chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[str, float]]]) -> dg.MarkdownMetadataValue:
    """Return a chart of lines by label."""
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
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.grid(visible=True, alpha=0.3)
    if any(lines):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _image(title, figure)


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
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 1]}…"


def _image(title: str, figure: Figure) -> dg.MarkdownMetadataValue:
    from PIL import Image

    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    # A palette makes the image a quarter as large; every run stores one.
    Image.open(drawn).convert("RGB").quantize(64).save(image, "png", optimize=True)
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{base64.b64encode(image.getvalue()).decode()})")
