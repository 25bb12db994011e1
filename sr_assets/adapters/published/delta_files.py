"""Incremental publication of large tables: a base file that stays, and a delta file that each publication rewrites.

All rows are written again if a base row changed or was deleted without a newer row of its key, or if the deltas have
written as many rows as the base file holds. So each row is written about three times.
"""

from pathlib import Path
from typing import Final

import duckdb

from sr_assets.adapters.published.publication import BaseFile, Written
from sr_assets.adapters.published.table import Table, literal

#: Below this number of rows, writing all of them is as fast as finding the new ones.
LARGE: Final = 10_000


class IncrementalTable:
    """The rows of one incremental table in a site's state that fulfil a condition."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, site: str, table: Table, condition: str) -> None:
        assert table.growth is not None
        self._connection = connection
        self._time = f"coalesce({table.growth.time}, 0)"
        self._mark = table.growth.mark
        self._key = (table.growth.key or "").replace("$name", literal(site))
        self._rows = f"{table.state} WHERE {condition}"

    def later(self, until_ns: int) -> str:
        """Return the condition for rows of the delta file."""
        return f"{self._time} >= {until_ns}"

    def keep(self, base: BaseFile, folder: Path) -> BaseFile | None:
        """Return the base file if it and the delta rows are the whole table, or None if all rows must be written."""
        rows, mark, later = self._row(
            f"""
            SELECT count(*) FILTER (early), coalesce(sum({self._mark}) FILTER (early), 0), count(*) FILTER (NOT early)
            FROM (SELECT *, {self._time} < {base.until_ns} AS early FROM {self._rows})
            """
        )
        if (rows, mark) != (base.rows, base.mark) and self._key:
            replaced, replaced_mark = self._row(
                f"""
                SELECT count(*), coalesce(sum(row_mark), 0) FROM read_parquet({literal(str(folder / base.file))})
                WHERE row_key IN (SELECT {self._key} FROM {self._rows} AND {self.later(base.until_ns)})
                """
            )
            rows, mark = rows + replaced, mark + replaced_mark
        written = base.written + later
        if (rows, mark) != (base.rows, base.mark) or written >= base.rows:
            return None
        return base._replace(written=written)

    def begin(self, written: Written) -> BaseFile | None:
        """Return a file with all rows as the new base file, or None if the table is small."""
        if written.rows < LARGE:
            return None
        rows, mark, until_ns = self._row(f"SELECT count(*), sum({self._mark}), max({self._time}) + 1 FROM {self._rows}")
        return BaseFile(written.name, rows, mark, until_ns)

    def _row(self, query: str) -> tuple[int, ...]:
        return tuple(map(int, self._connection.execute(query).fetchall()[0]))
