"""A graph as a picture that every browser shows, without graphviz: columns from the origins to the last copies.

Not here: what is drawn (`graph`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape, quoteattr

if TYPE_CHECKING:
    from sr_assets.domain.topology.graph import Edge, Graph, Node

_WIDTH, _HEIGHT = 190, 46
_COLUMN, _ROW = 420, 92
_MARGIN: Final = 16
_LETTERS: Final = 26
_LINE: Final = 12


def svg(graph: Graph) -> str:
    """Return the graph as SVG, every name escaped."""
    places = _places(graph)
    width = max((x for x, _ in places.values()), default=0) + _WIDTH + _MARGIN
    height = max((y for _, y in places.values()), default=0) + _ROW
    colours = sorted({edge.colour for edge in graph.edges})
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *(_arrow(colour) for colour in colours),
        *(_edge(edge, places[edge.origin], places[edge.copy]) for edge in graph.edges),
        *(_node(node, *place) for node, place in places.items()),
        "</svg>",
    ]
    return "".join(parts)


def _places(graph: Graph) -> dict[Node, tuple[int, int]]:
    """Return where each node stands: in a column right of all that it copies from, where nothing goes round."""
    depth = dict.fromkeys(graph.nodes, 0)
    for _ in graph.nodes:
        deeper = {edge.copy: depth[edge.origin] + 1 for edge in graph.edges if depth[edge.copy] <= depth[edge.origin]}
        deeper = {node: column for node, column in deeper.items() if column < len(graph.nodes)}
        if not deeper:
            break
        depth |= deeper
    rows: dict[int, int] = defaultdict(int)
    places = {}
    for node, column in depth.items():
        places[node] = (_MARGIN + column * _COLUMN, _MARGIN + rows[column] * _ROW)
        rows[column] += 1
    return places


def _node(node: Node, x: int, y: int) -> str:
    lines = "".join(
        f'<text x="{x + 8}" y="{y + line}" fill="{colour}">{escape(_short(text))}</text>'
        for text, line, colour in ((node.place, 18, "gray"), (node.stream, 35, "black"))
    )
    title = f"<title>{escape(_printable(f'{node.place} {node.stream}'))}</title>"
    return f'<g>{title}<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="white" stroke="black"/>{lines}</g>'


def _edge(edge: Edge, origin: tuple[int, int], copy: tuple[int, int]) -> str:
    left, top, right, bottom = origin[0] + _WIDTH, origin[1] + _HEIGHT // 2, copy[0], copy[1] + _HEIGHT // 2
    bend = max(60, (right - left) // 2)
    path = f"M{left},{top} C{left + bend},{top} {right - bend},{bottom} {right - 6},{bottom}"
    dashes = ' stroke-dasharray="6 4"' if edge.dashed else ""
    line = f'<path d="{path}" fill="none" stroke={quoteattr(edge.colour)}{dashes} marker-end="url(#to-{edge.colour})"/>'
    x, y = (left + right) // 2, (top + bottom) // 2 - 4
    words = "".join(
        f'<text x="{x}" y="{y - _LINE * (index - 1)}" text-anchor="middle" fill="{edge.colour}">{escape(_short(text))}</text>'
        for index, text in enumerate(reversed(edge.label.split("\n")))
    )
    return f"<g><title>{escape(_printable(edge.label))}</title>{line}{words}</g>"


def _arrow(colour: str) -> str:
    return (
        f'<marker id="to-{colour}" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        f'<path d="M0,0 L6,3 L0,6 z" fill="{colour}"/></marker>'
    )


def _short(text: str) -> str:
    plain = _printable(text)
    return plain if len(plain) <= _LETTERS else f"{plain[: _LETTERS - 1]}…"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
