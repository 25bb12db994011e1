"""The daily tables: their columns, files and views; add a daily table here.

Each day is one file, `<folder>/YYYY-MM-DD.parquet`, replaced atomically.
"""

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

import duckdb

from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.tables import kinds_of, literal, pattern_in_home
from sr_assets.domain.errors import RunError, cannot_write

#: The beginning of the name of the file without rows, so that the view's pattern always matches one.
_EMPTY: Final = "0000-00-00"
_DAY: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]"


@dataclass(frozen=True, slots=True)
class DailyTable:
    """A daily table of `fleet.duckdb`: name, folder in a home, and columns as DuckDB declares them.

    `order` are the columns by which Spark sorts the rows of a day. `clocks` is the query of each stream's progress: name,
    stream, known_until (NULL: none). `computed` names the content, as in "availability of 2026-01-31".
    """

    name: str
    folder: str
    computed: str
    columns: str
    order: tuple[str, ...]
    clocks: str

    @property
    def kinds(self) -> dict[str, str]:
        """Type of each column by name, in column order."""
        return kinds_of(self.columns)

    def computed_dates(self, home: Path) -> list[date]:
        """Return the computed dates in order."""
        stems = (file.stem for file in (home / self.folder).glob(f"{_DAY}.parquet") if file.stem != _EMPTY)
        return sorted(date.fromisoformat(text) for text in stems)

    def count_rows(self, home: Path, dates: Iterable[date]) -> int:
        """Return the number of rows of computed days."""
        files = ", ".join(literal(str(home / self.folder / f"{when}.parquet")) for when in dates)
        with duckdb.connect() as connection:
            ((rows,),) = connection.execute(f"SELECT count(*) FROM read_parquet([{files}])").fetchall()
        return int(rows)

    def forget_before(self, home: Path, first: date) -> None:
        """Delete the files of days before a date."""
        for when in self.computed_dates(home):
            if when < first:
                (home / self.folder / f"{when}.parquet").unlink(missing_ok=True)

    def view(self, connection: duckdb.DuckDBPyConnection, home: Path, mode: int) -> str:
        """Return the query of the table's view, which shows a day as soon as its file exists."""
        empty = home / self.folder / f"{_EMPTY}-{len(self.kinds)}.parquet"
        if not empty.exists():
            make_shared_folder(empty.parent)
            self._write(connection, empty, self._no_rows, mode)
        pattern = pattern_in_home(str(home), f"{self.folder}/*.parquet")
        # Files of an earlier build lack the newest columns. DuckDB reads every file for their names.
        by_name = str((home / self.folder / f"{_EMPTY}.parquet").exists()).lower()
        columns = ", ".join(self.kinds)
        return f"SELECT {columns} FROM read_parquet({pattern}, hive_partitioning = false, union_by_name = {by_name})"

    def write_days(
        self, connection: duckdb.DuckDBPyConnection, home: Path, query: str, dates: Iterable[date], mode: int
    ) -> dict[date, int]:
        """Replace the rows of some days by those of a query; return the number of rows by date.

        The files have permissions `mode`. Raises RunError if they cannot be written.
        """
        folder = home / self.folder
        try:
            make_shared_folder(folder)
            return {
                when: self._write(
                    connection, folder / f"{when}.parquet", f"FROM ({query}) WHERE date = DATE '{when}'", mode
                )
                for when in dates
            }
        except (OSError, duckdb.OperationalError) as error:
            raise RunError(cannot_write(folder, OSError(str(error).splitlines()[0]))) from None

    def move_days(
        self,
        connection: duckdb.DuckDBPyConnection,
        home: Path,
        files: Mapping[date, Path],
        dates: Iterable[date],
        mode: int,
    ) -> dict[date, int]:
        """Replace the rows of some days by those of files with the columns of the table; return the number of rows by date.

        A day without a file has no rows. Raises RunError if the files cannot be moved.
        """
        folder, rows = home / self.folder, dict[date, int]()
        try:
            for when in dates:
                file = folder / f"{when}.parquet"
                if draft := files.get(when):
                    query = f"SELECT count(*) FROM read_parquet({literal(glob.escape(str(draft)))})"
                    rows[when] = int(connection.execute(query).fetchall()[0][0])
                    draft.chmod(mode)
                    draft.replace(file)
                else:
                    rows[when] = self._write(connection, file, self._no_rows, mode)
        except (OSError, duckdb.OperationalError) as error:
            raise RunError(cannot_write(folder, OSError(str(error).splitlines()[0]))) from None
        return rows

    @property
    def _no_rows(self) -> str:
        return f"SELECT {', '.join(['NULL'] * len(self.kinds))} WHERE false"

    def _write(self, connection: duckdb.DuckDBPyConnection, file: Path, query: str, mode: int) -> int:
        """Replace a file by the rows of a query, atomically; return the number of rows."""
        draft = file.with_name(f".{file.name}.new")
        ((rows,),) = connection.execute(
            f"COPY ({cast(query, self.kinds)}) TO {literal(str(draft))} (FORMAT parquet, COMPRESSION zstd)"
        ).fetchall()
        draft.chmod(mode)
        draft.replace(file)
        return int(rows)


def cast(query: str, kinds: Mapping[str, str]) -> str:
    """Return a query with the columns cast to types, and named."""
    columns = ", ".join(f"{name}::{kind} AS {name}" for name, kind in kinds.items())
    return f"SELECT {columns} FROM ({query}) AS made ({', '.join(kinds)})"


AVAILABILITY: Final = DailyTable(
    "availability_daily",
    "availability",
    "availability",
    """
    date DATE, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, up_seconds DOUBLE, timeout_seconds DOUBLE,
    retired_seconds DOUBLE, blind_seconds DOUBLE, transitions BIGINT, outages BIGINT, longest_outage_seconds DOUBLE,
    final BOOLEAN, maintenance_seconds DOUBLE
    """,
    ("name", "stream", "node"),
    """
    SELECT name, stream, watermark AS known_until FROM replication
    UNION ALL SELECT name, stream, least(watermark, as_of) FROM global_summary
    """,
)
# Copies follow source order: queued messages are later than copied ones.
INVENTORY: Final = DailyTable(
    "inventory_daily",
    "inventory",
    "inventory",
    """
    date DATE, name VARCHAR, stream VARCHAR, property VARCHAR, value VARCHAR, nodes BIGINT, came BIGINT, went BIGINT,
    all_nodes BIGINT, final BOOLEAN
    """,
    ("name", "stream", "property", "value"),
    """
    SELECT name, stream, CASE WHEN queued_messages = 0 THEN watermark ELSE least(watermark, copied_until) END AS known_until
    FROM replication LEFT JOIN (
        SELECT name, stream, max(stored_at) AS copied_until FROM node_snapshots GROUP BY ALL) USING (name, stream)
    """,
)
DAILY_TABLES: Final = (AVAILABILITY, INVENTORY)


def names(tables: Iterable[DailyTable] = DAILY_TABLES) -> list[str]:
    return [table.name for table in tables]
