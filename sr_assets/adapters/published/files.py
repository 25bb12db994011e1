"""Writing the files of one publication: Parquet, never changed once they are written.

Here: one file, and what becomes of those of a publication that fails. Not here: which rows are in it (`site_files`).
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, NamedTuple, Self

import duckdb

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.publication import file_name
from sr_assets.adapters.published.table import literal
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from pathlib import Path

    from sr_assets.adapters.published.table import Table


class Written(NamedTuple):
    """A file that was written."""

    name: str
    size: int
    rows: int


class Files:
    """The files of one publication, with permissions `mode`; entered with `with`, and removed again when that fails.

    Raises RunError when they cannot be written.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path, mode: int) -> None:
        """Name the connection with the rows, and the site's folder."""
        self._connection, self._folder, self._mode = connection, folder, mode
        self.token = uuid.uuid4().hex
        self._begun: list[Path] = []

    def __enter__(self) -> Self:
        """Return it without a file."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Remove the files of a publication that failed."""
        if kind is None:
            reach(Point.WRITTEN_TABLES)
            return
        for file in self._begun:
            file.unlink(missing_ok=True)
        if isinstance(error, duckdb.OperationalError):
            raise RunError(cannot_write(self._folder, OSError(str(error).splitlines()[0]))) from None

    def write(self, name: str, table: Table, query: str) -> Written | None:
        """Write the rows of a query, with a table's columns in their order, to a file; None when there are none."""
        file = self._folder / file_name(name, self.token)
        self._begun.append(file)
        kinds = table.kinds | ({"row_key": "UBIGINT", "row_mark": "UBIGINT"} if table.replaced else {})
        cast = ", ".join(f"{column}::{kind} AS {column}" for column, kind in kinds.items())
        source = f"SELECT {cast} FROM ({query}) AS made ({', '.join(kinds)})"
        ((rows,),) = self._connection.execute(
            f"COPY ({source}) TO {literal(str(file))} (FORMAT parquet, COMPRESSION zstd)"
        ).fetchall()
        if not rows:
            file.unlink()
            return None
        file.chmod(self._mode)
        return Written(file.name, file.stat().st_size, rows)
