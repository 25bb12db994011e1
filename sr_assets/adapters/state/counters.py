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
    them. `IMPOSSIBLE_HOPS` counts the values of `Choria-SR-Source` in measured copies that are no possible hop.
    `FORGED_COPIES` counts messages of the target that claim to be copies and differ from their originals.
    `REFUSED_METADATA` counts copied registrations whose content is unreadable or too large, so that they have no metadata.
    `REFUSED_SENDERS` counts messages of senders that are no node because the stream has as many as it may have.
    `PROCESSED_MESSAGES` took `PROCESSING_SECONDS`.
    """

    SEEN_BYTES = "seen_bytes"
    SKIPPED_BYTES = "skipped_bytes"
    FORCED_MESSAGES = "forced_messages"
    PROCESSED_MESSAGES = "processed_messages"
    PROCESSING_SECONDS = "processing_seconds"
    RECALLED_MESSAGES = "recalled_messages"
    IMPOSSIBLE_HOPS = "impossible_hops"
    FORGED_COPIES = "forged_copies"
    REFUSED_METADATA = "refused_metadata"
    REFUSED_SENDERS = "refused_senders"
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
        # A MERGE takes twice as long to plan, and nearly every counter exists.
        ((updated,),) = self._connection.execute(
            """
            UPDATE counters SET total = total + (?::DOUBLE[])[list_position(?::VARCHAR[], counter)]
            WHERE stream = ? AND label = ? AND list_contains(?::VARCHAR[], counter)
            """,
            [more, names, self._stream, label, names],
        ).fetchall()
        if updated < len(rows):
            self._connection.execute(
                """
                INSERT INTO counters (stream, counter, label, total) SELECT $stream, counter, $label, more
                FROM (SELECT unnest($names::VARCHAR[]) AS counter, unnest($more::DOUBLE[]) AS more) AS added
                WHERE counter NOT IN (SELECT counter FROM counters WHERE stream = $stream AND label = $label)
                """,
                {"stream": self._stream, "label": label, "names": names, "more": more},
            )

    def totals(self) -> dict[str, dict[str, float]]:
        """Return every counter by name and label, without counters that were never incremented."""
        totals: dict[str, dict[str, float]] = defaultdict(dict)
        query = "SELECT counter, label, total FROM counters WHERE stream = ?"
        for counter, label, total in self._connection.rows(query, [self._stream]):
            totals[counter][label] = total
        return dict(totals)
