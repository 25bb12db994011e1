"""`control.db`: the state that the processes of a home share, in SQLite.

Only the run that holds a site's lock can open the site's `state.duckdb`; every process can open this database, also during a run.
Files remain for what must be written even on a full disk (kernel locks, leases, marks whose time is their content), for
secrets, and for what others read.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.earlier_files import import_earlier_files, remove_earlier_files
from sr_assets.adapters.private import open_private, own_folder, refuse_foreign
from sr_assets.domain.errors import RunError, cannot_write

FILE: Final = "control.db"
_VERSION: Final = 1
#: `site` is a folder in `sites`; `status`, `windows.rule`, `progress`, `stored` and `value` are JSON.
_SCHEMA: Final = """
-- The status of a site's streams at its last commit, and the size and time of the state when the last run closed it.
CREATE TABLE IF NOT EXISTS site_status (site TEXT PRIMARY KEY, status TEXT, closed TEXT) STRICT;
-- The streams that `pause` stopped.
CREATE TABLE IF NOT EXISTS paused (site TEXT, stream TEXT, PRIMARY KEY (site, stream)) STRICT;
-- The maintenance windows that operators added, in the order of adding.
CREATE TABLE IF NOT EXISTS windows (number INTEGER PRIMARY KEY, site TEXT, id TEXT, rule TEXT, UNIQUE (site, id)) STRICT;
-- Requests of `retire` and `unretire` to a run; `done` and `line` are its answer.
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, site TEXT, stream TEXT, action TEXT, node TEXT, reason TEXT, at TEXT,
    user TEXT, host TEXT, boot TEXT, boot_seconds REAL, created REAL, taken INTEGER DEFAULT 0, done INTEGER, line TEXT
) STRICT;
-- Orders to a site's process; while one that was taken is carried out, another one may be given.
CREATE TABLE IF NOT EXISTS orders (site TEXT, name TEXT, taken INTEGER, PRIMARY KEY (site, name, taken)) STRICT;
-- Requested refills of a stream's history; after one under way, another one follows if `again`.
CREATE TABLE IF NOT EXISTS refills (
    site TEXT, stream TEXT, progress TEXT, again INTEGER DEFAULT 0, PRIMARY KEY (site, stream)
) STRICT;
-- The newest checkpoint that this home has stored or shown, and the highest number of a signed one.
CREATE TABLE IF NOT EXISTS checkpoints (site TEXT PRIMARY KEY, stored TEXT, seen INTEGER DEFAULT 0) STRICT;
-- The counts of the publisher of the block `heartbeats`.
CREATE TABLE IF NOT EXISTS heartbeats (
    site TEXT, subject TEXT, published INTEGER, errors INTEGER, seconds REAL, PRIMARY KEY (site, subject)
) STRICT;
-- The last failure of each job whose run could not record it in a state.
CREATE TABLE IF NOT EXISTS run_failures (
    job TEXT PRIMARY KEY, run_id TEXT, name TEXT, streams TEXT, reason TEXT, since_ns INTEGER
) STRICT;
-- The sites that wait for a run, in seconds of the monotonic clock; `taken` is the time at which its run was started.
CREATE TABLE IF NOT EXISTS site_queue (site TEXT PRIMARY KEY, since REAL, renewed REAL, taken REAL) STRICT;
-- The memory of the process that does the hourly and nightly jobs.
CREATE TABLE IF NOT EXISTS due_work (name TEXT PRIMARY KEY, value TEXT) STRICT;
-- The progress of the notifications to each target of `notify`.
CREATE TABLE IF NOT EXISTS notified (target TEXT PRIMARY KEY, progress TEXT) STRICT;
"""
_BUSY_SECONDS: Final = 30.0
#: A process works with one home; tests with some.
_KEPT_OPEN: Final = 3

Rows = list[tuple[Any, ...]]


class _Connections:
    """The open connections of this process; hold its `guard` while you use one.

    They hold POSIX locks. The kernel drops these if the process opens and closes a file of the database by other means, so no
    code may do that. A forked process inherits no lock, but SQLite in it would act as if it held its parent's, so all connections
    are closed before a fork.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        #: By the file's device and inode: a deleted and recreated file is another one.
        self._open: dict[tuple[int, int], tuple[Path, sqlite3.Connection]] = {}
        #: Those of deleted files: closing one would delete files of the new database.
        self._left: list[sqlite3.Connection] = []
        os.register_at_fork(
            before=self._close_all, after_in_parent=self.guard.release, after_in_child=self.guard.release
        )

    def find(self, status: os.stat_result) -> sqlite3.Connection | None:
        known = self._open.get((status.st_dev, status.st_ino))
        return known[1] if known else None

    def add(self, file: Path, status: os.stat_result, connection: sqlite3.Connection) -> None:
        while len(self._open) >= _KEPT_OPEN:
            self._close(next(iter(self._open)))
        self._open[status.st_dev, status.st_ino] = (file, connection)

    def _close_all(self) -> None:
        self.guard.acquire()
        for place in list(self._open):
            self._close(place)

    def _close(self, place: tuple[int, int]) -> None:
        file, connection = self._open.pop(place)
        try:
            status = file.stat()
            is_same = (status.st_dev, status.st_ino) == place
        except OSError:
            is_same = False
        if is_same:
            connection.close()
        else:
            self._left.append(connection)


_connections: Final = _Connections()


def place_of(folder: Path) -> tuple[Path, str]:
    """Return the home of a folder in `sites`, and the folder's name there; another folder is a home without a name."""
    sites = next((parent for parent in folder.parents if parent.name == "sites"), None)
    return (folder, "") if sites is None else (sites.parent, str(folder.relative_to(sites)))


def query(home: Path, statement: str, *values: object) -> Rows:
    """Return the rows of a query; none if this user cannot read the home. Raises RunError for a damaged file."""
    with _connections.guard, _one_line_errors(home / FILE):
        connection = _connect(home, creates=False)
        return [] if connection is None else connection.execute(statement, values).fetchall()


def change(home: Path, statement: str, *values: object, durable: bool = True) -> int:
    """Change rows and return their number; see `transaction`."""
    with transaction(home, durable=durable) as connection:
        return connection.execute(statement, values).rowcount


@contextmanager
def transaction(home: Path, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
    """Yield a connection with a transaction, which is committed at the block's end and survives a power loss.

    Unless `durable`, it may then be lost. Raises RunError, without a change, if the database cannot be read or written, and
    ConfigurationError if it belongs to another user.
    """
    with _connections.guard, _one_line_errors(home / FILE):
        connection = _connect(home, creates=True)
        assert connection is not None
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        with _transaction(connection):
            yield connection


def end_upgrade(folder: Path) -> None:
    """Remove the files that an earlier version left in a site's folder, whose lock this process holds, and in the home.

    Until then a process of that version may still need them: without them, it would copy a paused stream.
    """
    home, site = place_of(folder)
    query(home, "SELECT 1")  # reads them, unless that was done
    remove_earlier_files(home, site)


def forget(home: Path, site: str, stream: str | None = None) -> None:
    """Delete the rows of a site, or of one of its streams. Raises as `transaction`."""
    of = {"site": site} if stream is None else {"site": site, "stream": stream}
    with transaction(home) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            columns = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", [table])}
            if of.keys() <= columns:
                condition = " AND ".join(f"{name} = ?" for name in of)
                connection.execute(f"DELETE FROM {table} WHERE {condition}", list(of.values()))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Some errors, as of a full disk, have ended the transaction.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _connect(home: Path, *, creates: bool) -> sqlite3.Connection | None:
    """Return this process's connection; None if it only reads, and there is no database or this user cannot read it."""
    file = home / FILE
    try:
        known = file.stat()
        if creates:
            refuse_foreign(file, known)
        if connection := _connections.find(known):
            return connection
        readable = os.access(file, os.R_OK | os.W_OK)
        is_ours = file.lstat().st_uid == os.geteuid()
    except PermissionError:
        readable = is_ours = False
    except OSError:
        # Only a process of the home's owner creates the file for a reader, so that it belongs to the owner.
        readable = is_ours = (home / "sites").is_dir() and home.stat().st_uid == os.geteuid()
    if not creates and not readable:
        return None
    if creates or is_ours or file.is_symlink():
        try:
            if not home.is_dir():
                own_folder(home)
            # Before SQLite opens it: closing a descriptor later would drop the locks of this process.
            with open_private(file) as opened:
                known = os.fstat(opened.fileno())
        except OSError as error:
            raise RunError(cannot_write(file, error)) from None
    connection = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, home)
    except BaseException:
        connection.close()
        raise
    _connections.add(file.resolve(), known, connection)
    return connection


def _prepare(connection: sqlite3.Connection, home: Path) -> None:
    """Create the tables, if need be with the content of the files of an earlier version."""
    if (version := _version(connection)) > _VERSION:
        raise RunError(f"{home / FILE}: version {version} is of a later sr-assets; use that one, or another home")
    if version == _VERSION:
        return
    connection.execute("PRAGMA journal_mode = WAL")
    with _transaction(connection):
        if _version(connection) == _VERSION:
            return
        for statement in _SCHEMA.split(";\n"):
            connection.execute(statement)
        import_earlier_files(connection, home)
        connection.execute(f"PRAGMA user_version = {_VERSION}")


def _version(connection: sqlite3.Connection) -> int:
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    return int(version)


@contextmanager
def _one_line_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise RunError(
                f"{file} has been locked by another process for {_BUSY_SECONDS:g} s; stop that process, then retry"
            ) from None
        raise RunError(cannot_write(file, OSError(str(error)))) from None
    except sqlite3.DatabaseError as error:
        raise RunError(
            f"{file} cannot be read ({error}); stop the platform, move the file away, then pause streams and add"
            " maintenance windows again that must stay"
        ) from None
