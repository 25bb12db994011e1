"""The public Python API: the published tables in the forms of several libraries, and the sources of `data`.

Add a function for notebooks and scripts here.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, overload

import duckdb
import pandas as pd
import pyarrow as pa

from sr_assets.adapters.data import Source, source_named
from sr_assets.adapters.published.fleet_reader import attach_fleet
from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean
from sr_assets.settings import load_settings, load_sources

#: Integers and booleans keep their type if values are missing.
_NULLABLE = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}


#: What `read` returns.
Form = Literal["pandas", "arrow", "duckdb"]
_Folder = str | os.PathLike[str] | None


@overload
def read(
    table: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] = (),
    as_: Literal["pandas"] = "pandas",
    *,
    home: _Folder = None,
    config: _Folder = None,
) -> pd.DataFrame: ...


@overload
def read(
    table: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] = (),
    *,
    as_: Literal["arrow"],
    home: _Folder = None,
    config: _Folder = None,
) -> pa.Table: ...


@overload
def read(
    table: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] = (),
    *,
    as_: Literal["duckdb"],
    home: _Folder = None,
    config: _Folder = None,
) -> duckdb.DuckDBPyRelation: ...


def read(
    table: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    parameters: Sequence[object] = (),
    as_: Form = "pandas",
    *,
    home: _Folder = None,
    config: _Folder = None,
) -> pd.DataFrame | pa.Table | duckdb.DuckDBPyRelation:
    """Return a published table or view as of the last publication, or some `columns` and rows of it.

    `where` is a condition in SQL with a `?` for each of `parameters`. `as_` is the form: a pandas DataFrame, an Arrow table, or
    a DuckDB relation, which reads only what its query needs and shows this publication as long as it exists.

    `home` is the folder with `fleet.duckdb`; without it the configuration names it: the file `config`, else
    SR_ASSETS_CONFIG, else `conf/replication.yaml`. Times are UTC, integers and booleans nullable, JSON is text. Raises
    ConfigurationError for an unknown table, column or form, or a wrong condition, and RunError before the first publication.
    """
    if as_ not in get_args(Form):
        raise ConfigurationError(f"as_: {as_!r} is unknown; use one of: {', '.join(get_args(Form))}")
    folder = Path(home) if home is not None else load_settings(None if config is None else Path(config)).home
    connection = attach_fleet(folder)
    try:
        relation = _select(connection, table, columns, where, parameters)
        if as_ == "duckdb":
            return relation
        rows: pa.Table = relation.to_arrow_table()
    except duckdb.Error as error:
        raise RunError(f"table {table} cannot be read: {_first_line(error)}") from None
    connection.close()
    frame: pd.DataFrame = rows.to_pandas(types_mapper=_NULLABLE.get) if as_ == "pandas" else rows
    return frame


def _select(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    columns: Sequence[str] | None,
    where: str | None,
    parameters: Sequence[object],
) -> duckdb.DuckDBPyRelation:
    _refuse_unknown(table, connection)
    known = connection.table(table).columns
    for column in columns or ():
        if column not in known:
            hint = did_you_mean(column, known)
            raise ConfigurationError(
                f"table {table} has no column {column!r}; {hint}the columns are: {', '.join(known)}"
            )
    chosen = ", ".join(f'"{column}"' for column in columns or known)
    try:
        condition = f" WHERE ({where}\n)" if where else ""
        return connection.sql(f'SELECT {chosen} FROM "{table}"{condition}', params=list(parameters) or None)
    except duckdb.Error as error:
        raise ConfigurationError(f"table {table}: where: {_first_line(error)}") from None


def _first_line(error: duckdb.Error) -> str:
    return str(error).strip().partition("\n")[0]


def data(source: str, *, config: str | os.PathLike[str] | None = None) -> Source:
    """Return a source of the block `data`; each call opens its connection, unless it is inside `with`.

    The configuration is the file `config`, else SR_ASSETS_CONFIG, else `conf/replication.yaml`. `get(key)` raises
    MissingValueError for a missing key, unless it has a default. Raises ConfigurationError for an unknown source.
    """
    return source_named(load_sources(None if config is None else Path(config)).data, source)


def _refuse_unknown(table: str, connection: duckdb.DuckDBPyConnection) -> None:
    rows = connection.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main' ORDER BY table_name"
    ).fetchall()
    names = [name for (name,) in rows]
    if table not in names:
        hint = did_you_mean(table, names)
        raise ConfigurationError(f"no table {table!r} is published; {hint}the tables are: {', '.join(names)}")
