"""The definition of a published table, and how times are published.

Not here: the tables (`schema`, `global_schema`).
"""

from typing import NamedTuple


class Growth(NamedTuple):
    """How a table of the state grows, of which the earlier rows are not published again.

    `time` is the column of a row's time, later in the rows that come later. A row changed when the expression `mark` has
    another value. `key`, where rows are replaced by later ones, is the expression that has the same value in both.
    """

    time: str
    mark: str
    key: str | None = None


class Table(NamedTuple):
    """A table's columns as DuckDB declares them, and the query over a site's state that makes its rows.

    In the query `$name` is the site, and a condition can be added at its end. `state` is the table of the state without
    whose rows there are none. `entry` is its column that names the configured stream, or feed, that a row is of; `site` is
    the expression on the published table that gives the site that published a row.
    """

    columns: str
    query: str
    state: str
    entry: str = "stream"
    site: str = "name"
    growth: Growth | None = None

    @property
    def kinds(self) -> dict[str, str]:
        """The type of each column, by its name, in their order."""
        return dict(column.split(maxsplit=1) for column in self.columns.split(","))

    @property
    def replaced(self) -> bool:
        """Whether its rows are replaced by later ones: its files have the columns `row_key` and `row_mark` too."""
        return self.growth is not None and self.growth.key is not None


def at(column: str) -> str:
    """Return the SQL that publishes a column of unix nanoseconds as TIMESTAMPTZ."""
    return f"make_timestamptz({column} // 1000)"


def literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
