"""The partitions of a stream in `state.duckdb`: the filter and the lag of each lane."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from sr_assets.adapters.state.stream_table import StreamTable

SCHEMA: Final = """
CREATE TABLE partitions (
    stream VARCHAR, "partition" BIGINT, subject VARCHAR, lag_messages BIGINT, begins BIGINT, starts BIGINT);
"""


class Lane(NamedTuple):
    """A partition's filter, the messages that it has not processed yet (None: not counted), and the sequence at which its
    lane begins: earlier messages are read and copied without lanes. `starts` is the source's restart.
    """

    subject: str
    lag_messages: int | None
    begins: int
    starts: int


class Partitions(StreamTable):
    """One stream's partitions, in order of their numbers."""

    def lanes(self) -> list[Lane]:
        """Return the stored partitions."""
        query = 'SELECT subject, lag_messages, begins, starts FROM partitions WHERE stream = ? ORDER BY "partition"'
        return [Lane(*row) for row in self._connection.rows(query, [self._stream])]

    def at(self, sequence: int) -> tuple[str, ...]:
        """Return the filters of the lanes that take a sequence, or none before they begin."""
        return tuple(lane.subject for lane in self.lanes() if sequence >= lane.begins)

    def begins(self) -> int:
        """Return the sequence at which the lanes begin."""
        return int(self._value("SELECT coalesce(max(begins), 0) FROM partitions WHERE stream = ?"))

    def replace(self, lanes: Sequence[Lane]) -> None:
        """Store other partitions; call it inside a transaction."""
        self._connection.execute("DELETE FROM partitions WHERE stream = ?", [self._stream])
        rows = [(self._stream, number, *lane) for number, lane in enumerate(lanes)]
        if rows:
            self._connection.executemany("INSERT INTO partitions VALUES (?, ?, ?, ?, ?, ?)", rows)
