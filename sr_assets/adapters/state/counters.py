"""Counters of a stream in `state.duckdb` that only metrics show: what a row of `streams` or `copying` does not count already.

They are added to in the transaction of what they count, so they survive every crash and never decrease. Each row has one
writer, the lane that reads or the lane that copies, because both commit at the same time. Not here: what is made of them
(`operate.metrics`).
"""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import duckdb

SCHEMA: Final = """
CREATE TABLE counters (stream VARCHAR, counter VARCHAR, label VARCHAR, total DOUBLE);
"""


#: The label of what the copying counts beside the reading.
COPYING: Final = "copying"


class Counter(StrEnum):
    """What is counted. The labels: an advisory's is its event, `COPYING` marks seconds and errors of copying.

    `RECALLED_MESSAGES` were counted as copied and are lost in the target: `copied_messages` went back by them.
    `PROCESSED_MESSAGES` took `PROCESSING_SECONDS`.
    """

    SEEN_BYTES = "seen_bytes"
    SKIPPED_BYTES = "skipped_bytes"
    FORCED_MESSAGES = "forced_messages"
    PROCESSED_MESSAGES = "processed_messages"
    PROCESSING_SECONDS = "processing_seconds"
    RECALLED_MESSAGES = "recalled_messages"
    ERRORS = "errors"
    ADVISORIES = "advisories"
    ADVISORY_ERRORS = "advisory_errors"


class Counters:
    """One stream's counters. `add` is called inside a transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        """Take the connection and the stream's name."""
        self._connection = connection
        self._stream = stream

    def add(self, amounts: Mapping[Counter, float], label: str = "") -> None:
        """Add to some counters with a label; what is not positive is left out."""
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
        """Return every counter by name and label; what was never counted is left out."""
        totals: dict[str, dict[str, float]] = defaultdict(dict)
        rows = self._connection.execute(
            "SELECT counter, label, total FROM counters WHERE stream = ?", [self._stream]
        ).fetchall()
        for counter, label, total in rows:
            totals[counter][label] = total
        return dict(totals)
