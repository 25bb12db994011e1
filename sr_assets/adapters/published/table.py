"""The definition of a published table, and how times are published.

Not here: the tables (`schema`, `global_schema`).
"""

from typing import NamedTuple


class Table(NamedTuple):
    """A table's columns as DuckDB declares them, and the query over a site's state that makes its rows.

    In the query `$name` is the site, and a condition can be added at its end. `entry` is the column of the state that
    names the configured stream, or feed, that a row is of; `site` is the expression on the published table that gives
    the site that published a row.
    """

    columns: str
    query: str
    entry: str = "stream"
    site: str = "name"

    @property
    def kinds(self) -> dict[str, str]:
        """The type of each column, by its name, in their order."""
        return dict(column.split(maxsplit=1) for column in self.columns.split(","))


def at(column: str) -> str:
    """Return the SQL that publishes a column of unix nanoseconds as TIMESTAMPTZ."""
    return f"make_timestamptz({column} // 1000)"


def literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
