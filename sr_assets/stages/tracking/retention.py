"""The retention of retired nodes: of a stream, of its classes, and of all rows of a node."""

from sr_assets.adapters.state.nodes import Nodes
from sr_assets.settings import StreamSettings


def forget_old_nodes(nodes: Nodes, stream: StreamSettings, now_ns: int) -> int:
    """Delete a tracked stream's retired nodes beyond their retention, inside the caller's transaction.

    Return the highest transition counter among them, or 0.
    """
    blocks = stream.node_classes.blocks if stream.node_classes else ()
    kept_ns = {block.name: block.retired_retention_ns for block in blocks if block.retired_retention_ns is not None}
    highest = [nodes.forget_retired(now_ns - kept, of=name) for name, kept in kept_ns.items()]
    if stream.retired_retention_ns is not None:
        highest.append(nodes.forget_retired(now_ns - stream.retired_retention_ns, without=tuple(kept_ns)))
    if stream.purge_after_ns is not None:
        highest.append(nodes.purge_retired(now_ns - stream.purge_after_ns))
    return max(highest, default=0)
