"""Large tables that grow: their earlier rows stay in a file that was published before, the later ones are beside it.

Here: whether the earlier rows are still what was published, and which row is a later one. Not here: writing either
(`site_files`), putting them together again (`index`).

The file of earlier rows is written anew when one of them changed without a later row in its place, or went, and when as much
as it holds has been written beside it: each row is then written about three times, however few come at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.published.publication import BaseFile
from sr_assets.adapters.published.table import literal

if TYPE_CHECKING:
    from pathlib import Path

    import duckdb

    from sr_assets.adapters.published.publication import Written
    from sr_assets.adapters.published.table import Table

#: Below this, writing all rows takes no longer than finding out which of them are new.
LARGE: Final = 10_000


class IncrementalTable:
    """The rows of one growing table in a site's state, those of the streams in the table `configured`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, site: str, table: Table) -> None:
        """Take the open state, the site's name, and a table that grows."""
        assert table.growth is not None
        self._connection = connection
        self._time = f"coalesce({table.growth.time}, 0)"
        self._mark = table.growth.mark
        self._key = (table.growth.key or "").replace("$name", literal(site))
        self._rows = f"{table.state} WHERE {table.entry} IN (SELECT stream FROM configured)"

    def later(self, until_ns: int) -> str:
        """Return the condition under which a row is a later one."""
        return f"{self._time} >= {until_ns}"

    def keep(self, known: BaseFile, folder: Path) -> BaseFile | None:
        """Return a file of earlier rows if these and the later ones are all; None when all rows have to be written."""
        rows, mark, later = self._row(
            f"""
            SELECT count(*) FILTER (early), coalesce(sum({self._mark}) FILTER (early), 0), count(*) FILTER (NOT early)
            FROM (SELECT *, {self._time} < {known.until_ns} AS early FROM {self._rows})
            """
        )
        if (rows, mark) != (known.rows, known.mark) and self._key:
            replaced, replaced_mark = self._row(
                f"""
                SELECT count(*), coalesce(sum(row_mark), 0) FROM read_parquet({literal(str(folder / known.file))})
                WHERE row_key IN (SELECT {self._key} FROM {self._rows} AND {self.later(known.until_ns)})
                """
            )
            rows, mark = rows + replaced, mark + replaced_mark
        written = known.written + later
        if (rows, mark) != (known.rows, known.mark) or written >= known.rows:
            return None
        return known._replace(written=written)

    def begin(self, written: Written) -> BaseFile | None:
        """Return a file with all rows as one of earlier rows from now on; None when it is no large one."""
        if written.rows < LARGE:
            return None
        rows, mark, until_ns = self._row(f"SELECT count(*), sum({self._mark}), max({self._time}) + 1 FROM {self._rows}")
        return BaseFile(written.name, rows, mark, until_ns)

    def _row(self, query: str) -> tuple[int, ...]:
        return tuple(map(int, self._connection.execute(query).fetchall()[0]))
