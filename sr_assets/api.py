"""The public Python API: the published tables as pandas DataFrames, and the sources of `data`.

Add a function for notebooks and scripts here.
"""

import os
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa

from sr_assets.adapters.data import Source, source_named
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean
from sr_assets.settings import load_settings, load_sources

#: Integers and booleans keep their type if values are missing.
_NULLABLE = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}


def read(
    table: str, *, home: str | os.PathLike[str] | None = None, config: str | os.PathLike[str] | None = None
) -> pd.DataFrame:
    """Return a published table or view as of the last publication.

    `home` is the folder with `fleet.duckdb`; without it the configuration names it: the file `config`, else
    SR_ASSETS_CONFIG, else `conf/replication.yaml`. Times are UTC, integers and booleans nullable, JSON is text. Raises
    ConfigurationError for an unknown table, and RunError before the first publication.
    """
    folder = Path(home) if home is not None else load_settings(None if config is None else Path(config)).home
    with open_fleet(folder) as connection:
        try:
            _refuse_unknown(table, connection)
            rows: pa.Table = connection.sql(f'SELECT * FROM "{table}"').to_arrow_table()
        except duckdb.Error as error:
            raise RunError(f"table {table} cannot be read: {str(error).strip().partition(chr(10))[0]}") from None
    frame: pd.DataFrame = rows.to_pandas(types_mapper=_NULLABLE.get)
    return frame


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
