"""A stream's gaps in `state.duckdb`: holes in its source, adjacent ones merged into one row."""

from collections.abc import Iterable
from typing import Final, TypedDict

import pyarrow as pa

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.positions import DAY_NS, SequenceRange

#: Limit of new rows of a stream in one run; the last row of the reason counts further gaps.
MOST_ROWS: Final = 1_000

#: Reasons that remove single messages between existing ones.
_SPARSE: Final = frozenset({"filtered", "per_subject_limit"})


class Gap(TypedDict):
    """A row of table `gaps`."""

    stream: str
    first_sequence: int
    last_sequence: int
    messages: int
    reason: str
    noticed_ns: int


def gap_row(stream: str, hole: SequenceRange, messages: int, reason: str, noticed_ns: int) -> Gap:
    """Return a row of table `gaps`: `messages` are missing in a range of source sequences."""
    return Gap(
        stream=stream,
        first_sequence=hole.first,
        last_sequence=hole.next - 1,
        messages=messages,
        reason=reason,
        noticed_ns=noticed_ns,
    )


class Gaps(StreamTable):
    """One stream's gaps."""

    def add(self, gaps: Iterable[Gap], *, apart: int = 0, most: int = MOST_ROWS) -> int:
        """Add gaps in source order as at most `most` rows; return the number of new rows.

        Call it inside a transaction. A gap extends the last row of its reason if it follows that row and was noticed on
        the same UTC day. For a reason that removes many single messages, up to `apart` existing messages may separate
        the two.
        """
        rows: dict[str, list[Gap]] = {}
        stored: dict[str, Gap | None] = {}
        added = 0
        for gap in gaps:
            reason = gap["reason"]
            if reason not in rows:
                stored[reason] = self._last(reason)
                rows[reason] = [last] if (last := stored[reason]) is not None else []
            of_reason = rows[reason]
            allowed = apart if reason in _SPARSE else 0
            if of_reason and (added >= most or _follows(of_reason[-1], gap, allowed)):
                of_reason[-1] = _merged(of_reason[-1], gap)
            else:
                of_reason.append(gap)
                added += 1
        for reason, of_reason in rows.items():
            self._replace(stored[reason], of_reason)
        return added

    def _last(self, reason: str) -> Gap | None:
        rows = self._connection.execute(
            """
            SELECT first_sequence, last_sequence, messages, noticed_ns FROM gaps WHERE stream = ? AND reason = ?
            ORDER BY noticed_ns DESC, last_sequence DESC LIMIT 1
            """,
            [self._stream, reason],
        ).fetchall()
        if not rows:
            return None
        first, last, messages, noticed_ns = rows[0]
        return gap_row(self._stream, SequenceRange(first, last + 1), messages, reason, noticed_ns)

    def _replace(self, last: Gap | None, rows: list[Gap]) -> None:
        """Write rows; the first one replaces the previous last row."""
        if last is not None:
            self._connection.execute(
                "DELETE FROM gaps WHERE stream = ? AND reason = ? AND noticed_ns = ? AND last_sequence = ?",
                [last["stream"], last["reason"], last["noticed_ns"], last["last_sequence"]],
            )
        self._connection.register("added", pa.Table.from_pylist([dict(row) for row in rows]))
        try:
            self._connection.execute("INSERT INTO gaps BY NAME SELECT * FROM added")
        finally:
            self._connection.unregister("added")


def _follows(last: Gap, gap: Gap, apart: int) -> bool:
    between = gap["first_sequence"] - last["last_sequence"] - 1
    return 0 <= between <= apart and last["noticed_ns"] // DAY_NS == gap["noticed_ns"] // DAY_NS


def _merged(last: Gap, gap: Gap) -> Gap:
    return {
        **gap,
        "first_sequence": min(last["first_sequence"], gap["first_sequence"]),
        "last_sequence": max(last["last_sequence"], gap["last_sequence"]),
        "messages": last["messages"] + gap["messages"],
    }
