"""The tables of native mirrors and sources: their columns, and publishing their rows, as if by a site of their own.

Not here: the rows (`stages.topology`), what shows them (`index`, `views`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.files import Files
from sr_assets.adapters.published.fleet_lock import LOCK_SECONDS
from sr_assets.adapters.published.index import Run, publish_index
from sr_assets.adapters.published.manifest import read_manifest
from sr_assets.adapters.published.publication import (
    Publication,
    publication_folder,
    read_publication,
    sweep,
    write_publication,
)
from sr_assets.adapters.published.topology_schema import TOPOLOGY_SITE, TOPOLOGY_TABLES
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def publish_topology(
    home: Path,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    sites: Sequence[str],
    run: Run,
    mode: int = 0o600,
    wait_seconds: float = LOCK_SECONDS,
) -> None:
    """Replace the rows of the tables, by table; called by one process at a time.

    `sites` are those whose rows are shown besides. Raises RunError when something cannot be written.
    """
    folder = publication_folder(home, TOPOLOGY_SITE)
    try:
        make_shared_folder(folder)
        before = read_publication(folder)
        with duckdb.connect() as connection:
            with Files(connection, folder, mode) as files:
                publication = Publication(TOPOLOGY_SITE, files.token, read_manifest(home).number, {}, [])
                for name, table in TOPOLOGY_TABLES.items():
                    columns = {column: [row[column] for row in rows[name]] for column in table.kinds}
                    connection.register(f"rows_of_{name}", pa.table(columns))
                    written = files.write(name, table, f"SELECT * FROM rows_of_{name}")
                    if written is not None:
                        publication.files[name] = {written.name: written.size}
            publication = write_publication(folder, publication, before)
            shown = publish_index(
                connection, home, publication, sites=sites, run=run, mode=mode, wait_seconds=wait_seconds
            )
        sweep(folder, publication, shown.numbers)
    except OSError as error:
        raise RunError(cannot_write(folder, error)) from None
