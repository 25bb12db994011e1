"""The partitions of a stream in `state.duckdb`: the filter and the lag of each lane."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from sr_assets.adapters.state.stream_table import StreamTable

SCHEMA: Final = """
CREATE TABLE partitions (stream VARCHAR, "partition" BIGINT, subject VARCHAR, lag_messages BIGINT);
"""


class Lane(NamedTuple):
    """A partition's filter, and the messages that it has not processed yet, or None if they were not counted."""

    subject: str
    lag_messages: int | None


class Partitions(StreamTable):
    """One stream's partitions, in order of their numbers."""

    def lanes(self) -> list[Lane]:
        """Return the stored partitions."""
        query = 'SELECT subject, lag_messages FROM partitions WHERE stream = ? ORDER BY "partition"'
        return [Lane(*row) for row in self._connection.execute(query, [self._stream]).fetchall()]

    def replace(self, lanes: Sequence[Lane]) -> None:
        """Store other partitions; call it inside a transaction."""
        self._connection.execute("DELETE FROM partitions WHERE stream = ?", [self._stream])
        rows = [(self._stream, number, *lane) for number, lane in enumerate(lanes)]
        if rows:
            self._connection.executemany("INSERT INTO partitions VALUES (?, ?, ?, ?)", rows)
