"""What happened to a stream, in `state.duckdb`: the retention of its transitions, gaps and parked messages.

Not here: adding to them (`store`), publishing transitions (`outbox`), the files of the history (`snapshot_index`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


def forget_history(connection: duckdb.DuckDBPyConnection, stream: str, *, gaps_ns: int, transitions_ns: int) -> None:
    """Drop gaps and parked messages noticed before one time, transitions and blind spans before another (unix ns).

    A transition that is not published yet stays, and so does the last one of each node that is known: it says since when
    the node is what it is. Called inside a transaction.
    """
    connection.execute("DELETE FROM gaps WHERE stream = ? AND noticed_ns < ?", [stream, gaps_ns])
    connection.execute("DELETE FROM parked WHERE stream = ? AND parked_ns < ?", [stream, gaps_ns])
    connection.execute("DELETE FROM blind_history WHERE stream = ? AND next_ns < ?", [stream, transitions_ns])
    connection.execute(
        """
        DELETE FROM transitions WHERE stream = $stream AND event_ns < $before_ns AND NOT (outbox AND published_ns IS NULL)
            AND NOT EXISTS (
                FROM nodes WHERE nodes.stream = $stream AND nodes.node = transitions.node
                    AND nodes.transition = transitions.transition)
        """,
        {"stream": stream, "before_ns": transitions_ns},
    )
