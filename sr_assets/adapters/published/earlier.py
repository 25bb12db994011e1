"""What an earlier version published, every site's rows in one file: kept until the sites have published themselves.

Here: taking these rows into files of each site. Not here: how a site publishes (`publishing`).
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import duckdb

from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.files import Files
from sr_assets.adapters.published.publication import (
    Publication,
    publication_folder,
    read_publication,
    write_publication,
)
from sr_assets.adapters.published.schema import TABLES
from sr_assets.adapters.published.table import literal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: The last version of the tables that had all rows in `fleet.duckdb`, in the same columns.
_VERSION: Final = 3


def take_over(connection: duckdb.DuckDBPyConnection, home: Path, sites: Iterable[str], mode: int) -> None:
    """Make a publication of each of some sites that has none, with its rows in the `fleet.duckdb` of an earlier version."""
    if not _attach(connection, home / "fleet.duckdb"):
        return
    try:
        if connection.execute("SELECT schema_version FROM earlier.snapshot_info").fetchall() != [(_VERSION,)]:
            return
        for site in sites:
            folder = publication_folder(home, site)
            if read_publication(folder) is None:
                make_shared_folder(folder)
                with Files(connection, folder, mode) as files:
                    written = {name: files.write(name, TABLES[name], query) for name, query in _queries(site).items()}
                history = connection.execute(
                    "SELECT DISTINCT file FROM earlier.latest_snapshots WHERE name = ? ORDER BY file", [site]
                ).fetchall()
                sizes = {name: {file.name: file.size} for name, file in written.items() if file is not None}
                publication = Publication(site, files.token, 0, sizes, [file for (file,) in history])
                write_publication(folder, publication, None)
    except duckdb.Error:
        # It is no file of ours, or a damaged one: the sites publish again by themselves.
        return
    finally:
        connection.execute("DETACH earlier")


def _queries(site: str) -> dict[str, str]:
    return {
        name: f"SELECT {', '.join(table.kinds)}{', NULL, NULL' if table.replaced else ''} FROM earlier.{name}"
        f" WHERE {table.site} = {literal(site)}"
        for name, table in TABLES.items()
    }


def _attach(connection: duckdb.DuckDBPyConnection, file: Path) -> bool:
    """Attach the published file to be read; of one that somebody has open for writing a copy, as it was published."""
    copy = file.with_name(f".{file.name}.read")
    for attached in (file, copy):
        try:
            if attached is copy:
                shutil.copyfile(file, copy)
            connection.execute(f"ATTACH {literal(str(attached.resolve()))} AS earlier (READ_ONLY)")
        except (OSError, duckdb.Error):
            continue
        finally:
            # The open file stays readable without its name.
            copy.unlink(missing_ok=True)
        return True
    return False
