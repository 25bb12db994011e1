"""The file `state.duckdb`: creating, opening and upgrading it, and the errors of a file that cannot be opened."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

import duckdb

from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.private import sync_folder
from sr_assets.adapters.state.cached_connection import AttachedFile
from sr_assets.adapters.state.schema import SCHEMA_VERSION, TABLES
from sr_assets.domain.errors import RunError, cannot_write

#: The content of an empty state that this process has created: DuckDB takes 70 ms of CPU time for its tables.
_empty: Final[list[bytes]] = []
#: How many replaced and how many broken states are kept.
_ASIDES: Final = 2
#: Parts of DuckDB's messages about a file that may be intact.
_INTACT_FILE_ERRORS: Final = (
    "Could not set lock",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE)),
)


class BrokenStateError(RunError):
    """A site's state exists but is unreadable."""


def first_line(error: duckdb.Error) -> str:
    """Return DuckDB's message without its hints."""
    return str(error).splitlines()[0]


def opening_error(file: Path, error: duckdb.Error) -> RunError:
    """Return BrokenStateError for a damaged file, or RunError for an intact file that cannot be opened."""
    reason = first_line(error)
    if any(part in reason for part in _INTACT_FILE_ERRORS):
        return RunError(f"the state {file} cannot be opened ({reason}); it was not changed")
    return BrokenStateError(
        f"the state {file} cannot be read ({reason}); set it aside and run `sr-assets recover` for each stream of the site"
    )


def open_database(file: Path) -> AttachedFile:
    """Open a state, or create it if it is missing.

    Raises BrokenStateError if it is not a readable state, OtherSchemaError if another version wrote it, and RunError if it
    cannot be opened.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not file.exists():
            create_database(file)
        opened = AttachedFile(file)
    except duckdb.Error as error:
        raise opening_error(file, error) from None
    connection = opened.main
    try:
        versions = connection.execute("SELECT schema_version FROM about").fetchall()
    except duckdb.Error as error:
        opened.close()
        raise opening_error(file, error) from None
    # The first unreleased schema was called 1 too; it had no table `copying`. Listing the tables would take 10 ms.
    with contextlib.suppress(duckdb.CatalogException):
        connection.execute("FROM copying LIMIT 0")
        if versions == [(SCHEMA_VERSION,)]:
            _add_missing(connection)
            return opened
    opened.close()
    raise OtherSchemaError(file, versions[0][0] if versions else None)


def _add_missing(connection: duckdb.DuckDBPyConnection) -> None:
    """Add the columns and tables that the state of an earlier build lacks."""
    grown = [table for table in TABLES.values() if table.added]
    columns = [f"{table.name}.{column}" for table in grown for column in table.added]
    tables = [table.name for table in TABLES.values() if table.added or table.later]
    try:
        connection.execute(f"SELECT {', '.join(columns)} FROM {', '.join(tables)} LIMIT 0")
    except (duckdb.BinderException, duckdb.CatalogException):
        for table in grown:
            for column in table.added:
                connection.execute(f"ALTER TABLE {table.name} ADD COLUMN IF NOT EXISTS {table.definition(column)}")
        known = {name for (name,) in connection.execute("SHOW TABLES").fetchall()}
        for table in TABLES.values():
            if table.later and table.name not in known:
                connection.execute(f"{table.ddl} {table.earlier}")


def create_database(file: Path) -> None:
    """Create an empty state atomically: half a file would need a recovery."""
    draft = file.with_name(f".{file.name}.new")
    for leftover in (draft, draft.with_name(f"{draft.name}.wal"), file.with_name(f"{file.name}.wal")):
        leftover.unlink(missing_ok=True)
    if _empty:
        try:
            with draft.open("xb") as written:
                written.write(_empty[0])
                written.flush()
                os.fsync(written.fileno())
        except OSError as error:
            raise RunError(cannot_write(file, error)) from None
    else:
        with AttachedFile(draft) as opened:
            opened.main.execute(" ".join(table.ddl for table in TABLES.values()))
            opened.main.execute("INSERT INTO about VALUES (?)", [SCHEMA_VERSION])
            opened.main.execute("CHECKPOINT")  # Closing would do so too, but without an error on a full disk.
        _empty.append(draft.read_bytes())
    draft.replace(file)
    sync_folder(file.parent)


def keep_newest_asides(file: Path, kind: str) -> None:
    """Delete all but the newest two states of a kind, `replaced` or `broken`, that were set aside; with their logs."""
    names = {aside.name.removesuffix(".wal") for aside in file.parent.glob(f"{file.name}.{kind}-*")}
    for name in sorted(names)[:-_ASIDES]:
        for aside in (file.with_name(name), file.with_name(f"{name}.wal")):
            aside.unlink(missing_ok=True)
