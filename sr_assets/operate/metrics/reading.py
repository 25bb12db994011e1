"""The text of `/metrics`, from each site's status file and the published tables.

Files are read again only after they were replaced. No state of a running site is opened and no server is queried.
"""

import contextlib
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb

from sr_assets.adapters import times
from sr_assets.adapters.published.manifest import identity
from sr_assets.adapters.published.reading import open_fleet
from sr_assets.adapters.state.status_file import STATUS_FILE, last_idle_poll, read_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.exposition import expose
from sr_assets.operate.metrics.election import election_lines
from sr_assets.operate.metrics.heartbeats import heartbeat_lines
from sr_assets.operate.metrics.replicator import LEGACY, REPLICATOR
from sr_assets.operate.metrics.stream import StreamNumbers
from sr_assets.operate.metrics.stream_metrics import STREAM_METRICS
from sr_assets.operate.metrics.table_metrics import TABLE_METRICS
from sr_assets.settings import Settings

Rows = dict[str, list[tuple[Any, ...]]]


class Exposition:
    """The metrics of a home as text; safe for several readers and one thread that calls `renew`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._status: dict[str, tuple[list[int], list[StreamNumbers]]] = {}
        self._tables_identity: list[int] = []
        self._rows: Rows = {}

    def text(self) -> str:
        """Return all metrics in Prometheus' text format; values from tables date from the last `renew`."""
        with self._guard:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        streams, now = list(self._streams()), times.time()
        legacy = LEGACY if self._settings.metrics.legacy else ()
        for metric in chain(STREAM_METRICS, REPLICATOR, legacy):
            yield from expose(metric.name, metric.kind, metric.text, metric.samples(streams, now))
        yield from election_lines(self._settings)
        yield from heartbeat_lines(self._settings)
        rows = self._rows
        for table in TABLE_METRICS:
            yield from expose(table.name, table.kind, table.text, table.samples(rows.get(table.name, ()), now))

    def _streams(self) -> Iterator[StreamNumbers]:
        for site in self._settings.sites:
            folder = self._settings.home / "sites" / site
            idle_at = last_idle_poll(folder)
            for stream in self._read(site, folder):
                stream.idle_at = idle_at
                yield stream

    def _read(self, site: str, folder: Path) -> list[StreamNumbers]:
        """Return the streams in a site's status file, which is read again if it was replaced."""
        current = identity(folder / STATUS_FILE)
        cached = self._status.get(site)
        if cached is None or cached[0] != current:
            streams = read_status(folder).get("streams", {})
            cached = self._status[site] = (
                current,
                [
                    StreamNumbers(entry, streams[entry.stream], self._settings.replicator, index)
                    for index, entry in enumerate(self._settings.sites[site])
                    if streams.get(entry.stream)
                ],
            )
        return cached[1]

    def renew(self) -> None:
        """Query the published tables again if they changed: the slowest step for a thousand sites."""
        current = identity(self._settings.home / "fleet.duckdb")
        if not current or current == self._tables_identity:
            return
        rows: Rows = {}
        with contextlib.suppress(SrAssetsError), open_fleet(self._settings.home) as connection:
            for metric in TABLE_METRICS:
                # A table is missing until its first publication.
                with contextlib.suppress(duckdb.Error):
                    rows[metric.name] = connection.execute(metric.query).fetchall()
            self._tables_identity, self._rows = current, rows
