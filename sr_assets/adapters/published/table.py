"""The definition of a published table, and SQL helpers for times and texts."""

from collections.abc import Iterable
from typing import NamedTuple


class Growth(NamedTuple):
    """How a table of the state grows; its base file is not written again.

    `time` is a row's time column, later in newer rows. A row has changed if the expression `mark` has changed. The
    expression `key`, if any, is equal in a row and the newer row that replaces it.
    """

    time: str
    mark: str
    key: str | None = None


class Table(NamedTuple):
    """A table's columns as DuckDB declares them, and the query that selects its rows from a site's state.

    In the query `$name` is the site, and a condition can be appended. Without a row in `state`, a table of the state, it
    has no rows. `entry` is its column with the configured stream or feed. `site` is the expression, on the published
    table, for the site that published a row.
    """

    columns: str
    query: str
    state: str
    entry: str = "stream"
    site: str = "name"
    growth: Growth | None = None

    @property
    def kinds(self) -> dict[str, str]:
        """Type of each column by name, in column order."""
        return dict(column.split(maxsplit=1) for column in self.columns.split(","))

    @property
    def reads_progress(self) -> bool:
        """Whether the rows come from `progress` too, which is no table of the state."""
        return "FROM progress" in self.query

    @property
    def replaced(self) -> bool:
        """Whether newer rows replace older ones: the files then have the columns `row_key` and `row_mark` too."""
        return self.growth is not None and self.growth.key is not None


def of_streams(column: str, streams: Iterable[str]) -> str:
    """Return the SQL condition that a column names one of some streams."""
    names = ", ".join(map(literal, streams))
    return f"{column} IN ({names})" if names else "false"


def at(column: str) -> str:
    """Return the SQL that converts a column of unix nanoseconds to TIMESTAMPTZ."""
    return f"make_timestamptz({column} // 1000)"


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
