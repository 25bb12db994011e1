"""A user's own SQL on the published tables, with limits of time and memory."""

import contextlib
import itertools
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, TypeVar

import duckdb

from sr_assets.adapters import times
from sr_assets.adapters.published.reading import OutOfMemoryError, open_fleet, start_query
from sr_assets.domain.errors import RunError

T = TypeVar("T")

#: Memory limit of the process: DuckDB limits its buffers, but not its strings and lists.
_PROCESS_BYTES: Final = 4 << 30
_FETCH_ROWS: Final = 2048
_AGAIN_SECONDS: Final = 0.05


@contextlib.contextmanager
def user_query(home: Path, sql: str, *, seconds: float) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]]:
    """Run one SELECT; yield its columns and an iterator that fetches its rows in portions.

    Raises ConfigurationError as `read_rows` does, and RunError if it takes longer than `seconds` or more memory than
    `MEMORY`. An interrupt (Ctrl-C) ends the query too.
    """
    with open_fleet(home, confined=True) as connection, ThreadPoolExecutor(1) as pool, _limited_memory():
        within = _Deadline(connection, pool, seconds)
        answer = within.call(lambda: start_query(connection, sql))
        batches = iter(lambda: within.call(lambda: answer.fetch(_FETCH_ROWS)), [])
        try:
            yield answer.columns, itertools.chain.from_iterable(batches)
        finally:
            # DuckDB computes beyond the fetched rows, and closing would wait for it.
            connection.interrupt()


class _Deadline:
    """Runs the steps of one query in a thread, so that this thread can end it: DuckDB ignores signals."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, pool: ThreadPoolExecutor, seconds: float) -> None:
        self._connection = connection
        self._pool = pool
        self._seconds = seconds
        self._end = times.monotonic() + seconds

    def call(self, work: Callable[[], T]) -> T:
        future = self._pool.submit(work)
        try:
            return future.result(max(0.0, self._end - times.monotonic()))
        except TimeoutError:
            raise RunError(
                f"the query took longer than {self._seconds:g} s; narrow it, or allow more with --timeout"
            ) from None
        except MemoryError:
            raise OutOfMemoryError from None
        finally:
            # DuckDB ignores an interrupt before the query starts, so repeat it.
            while not future.done():
                self._connection.interrupt()
                wait([future], _AGAIN_SECONDS)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the data of the process to `_PROCESS_BYTES` inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = min((limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), default=_PROCESS_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (min(lowest, _PROCESS_BYTES), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
