"""What is exposed at a moment: each site's status file and the published tables, read again when they have changed.

No state of a running site is opened and no server is asked. Not here: the metrics (`ours`, `replicator`, `centre`), who gets
the text (`serving`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import duckdb

from sr_assets.adapters.published.reading import open_fleet
from sr_assets.adapters.state.status_file import STATUS_FILE, last_look, read_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.exposition import expose
from sr_assets.operate.metrics.centre import TABLE_METRICS
from sr_assets.operate.metrics.ours import OURS
from sr_assets.operate.metrics.replicator import LEGACY, REPLICATOR
from sr_assets.operate.metrics.stream import StreamNumbers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets.settings import Settings

#: How long the published tables are not asked again: with a thousand sites there is a new file each second.
_TABLES_SECONDS: Final = 10.0
Mark = tuple[int, int, int]


@dataclass(slots=True)
class _Tables:
    """The rows of each metric of the tables: of which file, and when they were asked for (monotonic seconds)."""

    mark: Mark | None = None
    asked_at: float = 0.0
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)


class Exposition:
    """The metrics of a home as text; several threads may ask."""

    def __init__(self, settings: Settings) -> None:
        """Take the configuration, which names the sites."""
        self._settings = settings
        self._guard = threading.Lock()
        self._status: dict[str, tuple[Mark | None, list[StreamNumbers]]] = {}
        self._tables = _Tables()

    def text(self) -> str:
        """Return everything in Prometheus' text format."""
        with self._guard:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        streams, now = list(self._streams()), time.time()
        legacy = LEGACY if self._settings.metrics.legacy else ()
        for metric in chain(OURS, REPLICATOR, legacy):
            yield from expose(metric.name, metric.kind, metric.text, metric.samples(streams, now))
        rows = self._table_rows()
        for table in TABLE_METRICS:
            yield from expose(table.name, table.kind, table.text, table.samples(rows.get(table.name, ()), now))

    def _streams(self) -> Iterator[StreamNumbers]:
        for site in self._settings.sites:
            folder = self._settings.home / "sites" / site
            looked_at = last_look(folder)
            for stream in self._read(site, folder):
                stream.looked_at = looked_at
                yield stream

    def _read(self, site: str, folder: Path) -> list[StreamNumbers]:
        """Return the streams of a site's status, which is read when it was replaced."""
        mark = _mark(folder / STATUS_FILE)
        known = self._status.get(site)
        if known is None or known[0] != mark:
            streams = read_status(folder).get("streams", {})
            known = self._status[site] = (
                mark,
                [
                    StreamNumbers(entry, streams[entry.stream], self._settings.replicator, index)
                    for index, entry in enumerate(self._settings.sites[site])
                    if streams.get(entry.stream)
                ],
            )
        return known[1]

    def _table_rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return the rows of each metric of the tables, from a file that is `_TABLES_SECONDS` old at most."""
        mark, now = _mark(self._settings.home / "fleet.duckdb"), time.monotonic()
        tables = self._tables
        if mark is None or (tables.mark is not None and now - tables.asked_at < _TABLES_SECONDS) or mark == tables.mark:
            return tables.rows
        rows = {}
        with contextlib.suppress(SrAssetsError), open_fleet(self._settings.home) as connection:
            for metric in TABLE_METRICS:
                # Not every version publishes every table.
                with contextlib.suppress(duckdb.Error):
                    rows[metric.name] = connection.execute(metric.query).fetchall()
        self._tables = _Tables(mark, now, rows)
        return rows


def _mark(file: Path) -> Mark | None:
    """Return what changes when a file is replaced; None when there is none."""
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
