"""Links as a graph, also in graphviz's language DOT: a node is a stream of a domain, an edge a link with its colour and label."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from sr_assets.domain.foreign_text import visible
from sr_assets.domain.topology.links import Link

_COLOURS: Final = {"mirror": "blue", "source": "green", "replica": "black", "feed": "gray"}
_DEAD: Final = "red"


class Node(NamedTuple):
    """A stream; `place` is its domain, else the name of its cluster."""

    place: str
    stream: str


@dataclass(frozen=True, slots=True)
class Edge:
    """A link between two nodes, as drawn."""

    origin: Node
    copy: Node
    colour: str
    dashed: bool
    label: str


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and edges."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def graph_of(streams: Iterable[tuple[str, str | None, str]], links: Iterable[Link]) -> Graph:
    """Return the graph of streams (cluster, domain, stream) and links, including streams without a link."""
    nodes = dict.fromkeys(Node(domain or cluster, stream) for cluster, domain, stream in streams)
    edges = []
    for link in links:
        origin = Node(link.origin_domain or link.origin_cluster or f"unknown, of {link.cluster}", link.origin_stream)
        copy = Node(link.domain or link.cluster, link.stream)
        nodes |= dict.fromkeys((origin, copy))
        edges.append(Edge(origin, copy, _colour(link), not link.native, _label(link)))
    return Graph(tuple(nodes), tuple(edges))


def around(graph: Graph, node: Node) -> Graph:
    """Return the part of a graph that is connected with a node."""
    neighbours: dict[Node, set[Node]] = {}
    for edge in graph.edges:
        neighbours.setdefault(edge.origin, set()).add(edge.copy)
        neighbours.setdefault(edge.copy, set()).add(edge.origin)
    reached, new = {node}, [node]
    while new:
        for other in neighbours.get(new.pop(), set()) - reached:
            reached.add(other)
            new.append(other)
    return Graph(
        tuple(node for node in graph.nodes if node in reached),
        tuple(edge for edge in graph.edges if edge.origin in reached),
    )


def _colour(link: Link) -> str:
    return _DEAD if link.dead or link.error else _COLOURS[link.kind]


def _label(link: Link) -> str:
    lag = "lag unknown" if link.lag_messages is None else f"lag {link.lag_messages}"
    silent = ""
    if link.native and link.dead:
        silent = "never heard" if link.active_seconds is None else f"silent for {link.active_seconds:.0f}s"
    parts = (link.kind.capitalize(), link.copies, link.sampling, lag, silent, link.error)
    return "\n".join(part for part in parts if part)


def dot(graph: Graph) -> str:
    """Return the graph in the DOT language, every name escaped."""
    number = {node: f"n{index}" for index, node in enumerate(graph.nodes, 1)}
    lines = ["digraph {", '\tlabel="Stream Replication Structure";', "\trankdir=LR;", "\tnode [shape=box];"]
    names = {node: _quoted("\n".join(node)) for node in graph.nodes}
    lines += [f"\t{number[node]} [label={name}];" for node, name in names.items()]
    for edge in graph.edges:
        style = ' style="dashed"' if edge.dashed else ""
        lines.append(
            f'\t{number[edge.origin]} -> {number[edge.copy]} [color="{edge.colour}"{style} label={_quoted(edge.label)}];'
        )
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    """Return a text as a DOT string; graphviz would interpret escapes and entities in names."""
    plain = "\n".join(visible(line) for line in text.split("\n"))
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;").replace("\n", "\\n")
    return f'"{escaped}"'
