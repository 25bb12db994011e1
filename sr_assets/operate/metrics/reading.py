"""What is exposed at a moment: each site's status file and the published tables, read again when they have changed.

No state of a running site is opened and no server is asked. Not here: the metrics (`ours`, `replicator`, `centre`), who gets
the text (`serving`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import duckdb

from sr_assets.adapters.published.reading import open_fleet
from sr_assets.adapters.state.status_file import STATUS_FILE, last_idle_poll, read_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.exposition import expose
from sr_assets.operate.metrics.replicator import LEGACY, REPLICATOR
from sr_assets.operate.metrics.stream import StreamNumbers
from sr_assets.operate.metrics.stream_metrics import STREAM_METRICS
from sr_assets.operate.metrics.table_metrics import TABLE_METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets.settings import Settings

Mark = tuple[int, int, int]
Rows = dict[str, list[tuple[Any, ...]]]


class Exposition:
    """The metrics of a home as text; several threads may ask, and one may `renew` it."""

    def __init__(self, settings: Settings) -> None:
        """Take the configuration, which names the sites; the tables are read by the first `renew`."""
        self._settings = settings
        self._guard = threading.Lock()
        self._status: dict[str, tuple[Mark | None, list[StreamNumbers]]] = {}
        self._tables_mark: Mark | None = None
        self._rows: Rows = {}

    def text(self) -> str:
        """Return everything in Prometheus' text format; of the tables what they had at the last `renew`."""
        with self._guard:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        streams, now = list(self._streams()), time.time()
        legacy = LEGACY if self._settings.metrics.legacy else ()
        for metric in chain(STREAM_METRICS, REPLICATOR, legacy):
            yield from expose(metric.name, metric.kind, metric.text, metric.samples(streams, now))
        rows = self._rows
        for table in TABLE_METRICS:
            yield from expose(table.name, table.kind, table.text, table.samples(rows.get(table.name, ()), now))

    def _streams(self) -> Iterator[StreamNumbers]:
        for site in self._settings.sites:
            folder = self._settings.home / "sites" / site
            looked_at = last_idle_poll(folder)
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

    def renew(self) -> None:
        """Ask the published tables again if they have changed: with a thousand sites that takes longer than all else."""
        mark = _mark(self._settings.home / "fleet.duckdb")
        if mark is None or mark == self._tables_mark:
            return
        rows: Rows = {}
        with contextlib.suppress(SrAssetsError), open_fleet(self._settings.home) as connection:
            for metric in TABLE_METRICS:
                # Not every version publishes every table.
                with contextlib.suppress(duckdb.Error):
                    rows[metric.name] = connection.execute(metric.query).fetchall()
            self._tables_mark, self._rows = mark, rows


def _mark(file: Path) -> Mark | None:
    """Return what changes when a file is replaced; None when there is none."""
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
