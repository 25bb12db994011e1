"""Counters of a stream in `state.duckdb` that only metrics use; `streams` and `copying` hold the others.

The transaction that commits the counted work also adds to the counter, so counters survive every crash and never
decrease. Reading and copying commit concurrently, therefore each row has one writer.
"""

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from sr_assets.adapters.state.stream_table import StreamTable

SCHEMA: Final = """
CREATE TABLE counters (stream VARCHAR, counter VARCHAR, label VARCHAR, total DOUBLE);
"""
#: Label of the seconds and errors of copying; those of reading have none.
COPYING: Final = "copying"


class Counter(StrEnum):
    """Names of the counters. An advisory's label is its event; `COPYING` labels seconds, errors and connections of copying.

    `RECALLED_MESSAGES` counts messages that were copied and then lost in the target: `copied_messages` decreased by
    them. `PROCESSED_MESSAGES` took `PROCESSING_SECONDS`.
    """

    SEEN_BYTES = "seen_bytes"
    SKIPPED_BYTES = "skipped_bytes"
    FORCED_MESSAGES = "forced_messages"
    PROCESSED_MESSAGES = "processed_messages"
    PROCESSING_SECONDS = "processing_seconds"
    RECALLED_MESSAGES = "recalled_messages"
    ERRORS = "errors"
    CONNECTION_ERRORS = "connection_errors"
    CONNECTIONS_CLOSED = "connections_closed"
    RECONNECTIONS = "reconnections"
    ADVISORIES = "advisories"
    ADVISORY_ERRORS = "advisory_errors"


class Counters(StreamTable):
    """One stream's counters. Call `add` inside a transaction."""

    def add(self, amounts: Mapping[Counter, float], label: str = "") -> None:
        """Add positive amounts to counters with a label; ignore the others."""
        rows = [(counter.value, float(amount)) for counter, amount in amounts.items() if amount > 0]
        if not rows:
            return
        names, more = (list(column) for column in zip(*rows, strict=True))
        self._connection.execute(
            """
            MERGE INTO counters USING (SELECT unnest(?::VARCHAR[]) AS counter, unnest(?::DOUBLE[]) AS more) AS added
            ON counters.stream = ? AND counters.counter = added.counter AND counters.label = ?
            WHEN MATCHED THEN UPDATE SET total = counters.total + added.more
            WHEN NOT MATCHED THEN INSERT (stream, counter, label, total) VALUES (?, added.counter, ?, added.more)
            """,
            [names, more, self._stream, label, self._stream, label],
        )

    def totals(self) -> dict[str, dict[str, float]]:
        """Return every counter by name and label, without counters that were never incremented."""
        totals: dict[str, dict[str, float]] = defaultdict(dict)
        query = "SELECT counter, label, total FROM counters WHERE stream = ?"
        for counter, label, total in self._connection.rows(query, [self._stream]):
            totals[counter][label] = total
        return dict(totals)
