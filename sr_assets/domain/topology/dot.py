"""A graph in the DOT language of graphviz."""

from sr_assets.domain.foreign_text import visible
from sr_assets.domain.topology.graph import Graph


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
