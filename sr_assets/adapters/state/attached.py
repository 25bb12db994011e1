"""An open database file, attached to an instance of DuckDB that opens another file afterwards.

Making an instance takes 35 ms of CPU time, attaching a file to it 3 ms. An instance has one file at a time, because an
error that invalidates it must not affect another site.
"""

import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import Final, Self

import duckdb

#: How many instances wait for another file.
_KEPT: Final = 2
_idle: list[duckdb.DuckDBPyConnection] = []
_lock = threading.Lock()
_numbers = itertools.count(1)


class AttachedFile:
    """An open database file, created if it is missing, with the connection `main`; a context manager."""

    def __init__(self, file: Path) -> None:
        self._name = f"state_{next(_numbers)}"
        self._instance = _take(f"{file}.tmp")
        self._others: list[duckdb.DuckDBPyConnection] = []
        try:
            quoted = str(file).replace("'", "''")
            self._instance.execute(f"ATTACH '{quoted}' AS {self._name}")
            self.main = self._connect()
        except BaseException:
            self._instance.close()
            raise

    def __enter__(self) -> Self:
        """Return self; the file is open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = self._instance.cursor()
        # DuckDB draws the bar on stdout.
        connection.execute(f"USE {self._name}; SET enable_progress_bar = false")
        return connection

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return another connection, for another thread, which `disconnect` closes."""
        connection = self._connect()
        self._others.append(connection)
        return connection

    def disconnect(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Close a connection."""
        connection.close()
        if connection in self._others:
            self._others.remove(connection)

    def close(self) -> None:
        """Close the file and all its connections."""
        self.main.close()
        with contextlib.suppress(duckdb.Error):
            # The next file must never meet a connection to this one.
            if not self._others:
                self._instance.execute(f"DETACH {self._name}")
                # DuckDB deletes a folder in use only with the instance, and refuses to leave it.
                self._instance.execute("SET temp_directory = ''")
                if _put_back(self._instance):
                    return
        self._instance.close()


def _take(temporary: str) -> duckdb.DuckDBPyConnection:
    """Return an idle or a new instance that spills to the folder `temporary`."""
    with _lock:
        instance = _idle.pop() if _idle else None
    if instance is None:
        instance = duckdb.connect(config={"threads": 2, "memory_limit": "1GB"})
        instance.execute("SET GLOBAL TimeZone = 'UTC'")
    instance.execute("SET temp_directory = ?", [temporary])
    return instance


def _put_back(instance: duckdb.DuckDBPyConnection) -> bool:
    """Let an instance wait for another file; return False if enough others wait."""
    with _lock:
        if len(_idle) >= _KEPT:
            return False
        _idle.append(instance)
    return True


def _end_idle() -> None:
    """End the idle instances before the process forks: their threads would not exist in the child."""
    with _lock:
        while _idle:
            _idle.pop().close()


os.register_at_fork(before=_end_idle)
