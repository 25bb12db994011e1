"""The public Python API: the published tables in the forms of several libraries, and the sources of `data`.

Add a function for notebooks and scripts here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, overload

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from sr_assets.adapters.data import Source, source_named
from sr_assets.adapters.published.catalog import ROWS, columns_of
from sr_assets.adapters.published.fleet_reader import (
    attach_fleet,
    first_line,
    refuse_incomplete_history,
    refuse_unknown_table,
    unreadable,
)
from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.settings import load_settings, load_sources

if TYPE_CHECKING:
    import polars as pl

#: Integers and booleans keep their type if values are missing.
_NULLABLE = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}


#: What `read` returns.
Form = Literal["pandas", "arrow", "polars", "duckdb"]
_Folder = str | os.PathLike[str] | None


def connect(config: _Folder = None, *, home: _Folder = None) -> duckdb.DuckDBPyConnection:
    """Return a connection to the published tables, which cannot be changed, for use in `with`; times are in UTC.

    Every query shows the last publication at the time of the call, until the end of the block; `operator_actions` and the
    daily tables show new rows too. A cursor of the connection begins without these settings. `home` and `config` are those
    of `read`.

    Raises RunError before the first publication.
    """
    return attach_fleet(home_of(home, config))


def tables() -> pd.DataFrame:
    """Return a row for each column of each published table: `table`, `row`, `column`, `type`, `description`.

    `row` is what one row of the table is, `type` DuckDB's.
    """
    rows = [(table, row, *column) for table, row in ROWS.items() for column in columns_of(table, links=False)]
    return pd.DataFrame(rows, columns=["table", "row", "column", "type", "description"])


@overload
def read(
    table: str,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] | Mapping[str, object] = (),
    as_: Literal["pandas"] = "pandas",
    *,
    home: _Folder = None,
    config: _Folder = None,
) -> pd.DataFrame: ...


@overload
def read(
    table: str,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] | Mapping[str, object] = (),
    *,
    as_: Literal["arrow"],
    home: _Folder = None,
    config: _Folder = None,
) -> pa.Table: ...


@overload
def read(
    table: str,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] | Mapping[str, object] = (),
    *,
    as_: Literal["polars"],
    home: _Folder = None,
    config: _Folder = None,
) -> pl.DataFrame: ...


@overload
def read(
    table: str,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] | Mapping[str, object] = (),
    *,
    as_: Literal["duckdb"],
    home: _Folder = None,
    config: _Folder = None,
) -> duckdb.DuckDBPyRelation: ...


def read(
    table: str,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] | Mapping[str, object] = (),
    as_: Form = "pandas",
    *,
    home: _Folder = None,
    config: _Folder = None,
) -> pd.DataFrame | pa.Table | pl.DataFrame | duckdb.DuckDBPyRelation:
    """Return a published table or view as of the last publication, or some `columns` and rows of it.

    `where` is a condition in SQL with a `?` for each of `parameters`, or `$name` for a mapping. `as_` is the form: a pandas
    DataFrame, an Arrow table, a Polars DataFrame, or a DuckDB relation, which reads only what its query needs and shows this
    publication as long as it exists.

    `home` is the folder with `fleet.duckdb`; without it the configuration names it: the file `config`, else
    SR_ASSETS_CONFIG, else `conf/replication.yaml`. Times are UTC, integers and booleans nullable, JSON is text. Raises
    ConfigurationError for an unknown table, column or form, or a wrong condition, and RunError before the first publication.
    """
    if as_ not in get_args(Form):
        raise ConfigurationError(f"as_: {as_!r} is unknown; use one of: {', '.join(get_args(Form))}")
    folder = home_of(home, config)
    connection = attach_fleet(folder)
    with contextlib.ExitStack() as opened:
        opened.callback(connection.close)
        try:
            relation = _select(connection, table, columns, where, parameters)
            if table == "node_snapshot_history":
                refuse_incomplete_history(connection, folder)
            if as_ == "duckdb":
                # The relation keeps the connection open.
                opened.pop_all()
                return relation
            rows: pa.Table = relation.to_arrow_table()
        except (duckdb.DataError, duckdb.ProgrammingError) as error:
            # A condition that meets a value that it cannot compare.
            raise ConfigurationError(f"table {table}: where: {first_line(error)}") from None
        except duckdb.Error as error:
            raise unreadable(f"table {table}", error, folder) from None
    if as_ == "polars":
        return _as_polars(rows)
    frame: pd.DataFrame = rows.to_pandas(types_mapper=_NULLABLE.get) if as_ == "pandas" else rows
    return frame


def home_of(home: _Folder, config: _Folder) -> Path:
    """Return the home that is given or that the configuration names."""
    return Path(home) if home is not None else load_settings(None if config is None else Path(config)).home


def _as_polars(rows: pa.Table) -> pl.DataFrame:
    try:
        import polars as pl
    except ModuleNotFoundError:
        raise ConfigurationError("as_: polars is not installed; `pip install polars`, or use pandas or arrow") from None
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _select(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    columns: Iterable[str] | None,
    where: str | None,
    parameters: Sequence[object] | Mapping[str, object],
) -> duckdb.DuckDBPyRelation:
    refuse_unknown_table(table, connection)
    known = connection.table(table).columns
    wanted = known if columns is None else [columns] if isinstance(columns, str) else list(columns)
    for column in wanted:
        if column not in known:
            hint = did_you_mean(str(column), known)
            raise ConfigurationError(
                f"table {table} has no column {column!r}; {hint}the columns are: {', '.join(known)}"
            )
    chosen = ", ".join(f'"{column}"' for column in wanted or known)
    given = _given(parameters)
    if where is None or not where.strip():
        if given:
            raise ConfigurationError(f"table {table}: parameters belong to a condition; pass it as `where`")
        return connection.sql(f'SELECT {chosen} FROM "{table}"')
    try:
        return connection.sql(f'SELECT {chosen} FROM "{table}" WHERE ({where}\n)', params=given or None)
    except duckdb.IOException:
        raise
    except duckdb.Error as error:
        raise ConfigurationError(f"table {table}: where: {first_line(error)}") from None


def _given(parameters: Sequence[object] | Mapping[str, object] | None) -> list[object] | dict[str, object]:
    """Return parameters for DuckDB, which knows no scalars of numpy."""
    if isinstance(parameters, Mapping):
        return {name: _plain(value) for name, value in parameters.items()}
    if isinstance(parameters, str) or not isinstance(parameters or (), Iterable):
        raise ConfigurationError(f"parameters: {parameters!r} is not a list; pass one value for each `?`")
    return [_plain(value) for value in parameters or ()]


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def data(source: str, *, config: str | os.PathLike[str] | None = None) -> Source:
    """Return a source of the block `data`; each call opens its connection, unless it is inside `with`.

    The configuration is the file `config`, else SR_ASSETS_CONFIG, else `conf/replication.yaml`. `get(key)` raises
    MissingValueError for a missing key, unless it has a default. Raises ConfigurationError for an unknown source.
    """
    return source_named(load_sources(None if config is None else Path(config)).data, source)
