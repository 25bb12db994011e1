"""Stream infos that the sensors of many sites share: one query per cluster and round."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.settings import ClusterSettings, Entry


@dataclass(slots=True)
class _Response:
    """A cluster's stream infos, queried at `queried_at` (monotonic), and the labels of the entries that have read them."""

    queried_at: float
    infos: dict[str, StreamInfo | RunError]
    readers: set[str] = field(default_factory=set)


class StreamInfoCache:
    """The last stream infos of each source cluster, at most `max_age_seconds` old; thread-safe.

    Each entry reads a response once; its next read queries the cluster again. So the ticks of one round of all sensors share
    one query.
    """

    def __init__(self, entries: Sequence[Entry], max_age_seconds: float) -> None:
        streams: dict[ClusterSettings, dict[str, None]] = defaultdict(dict)
        for entry in entries:
            streams[entry.source][entry.stream] = None
        self._clusters = {cluster: _Cluster(cluster, list(names)) for cluster, names in streams.items()}
        self._max_age_seconds = max_age_seconds

    def stream_info(self, entry: Entry, since: float) -> StreamInfo:
        """Return the info of an entry's source, queried at `since` (monotonic) or later.

        Raises RunError if the cluster does not respond or the stream does not exist.
        """
        since = max(since, time.monotonic() - self._max_age_seconds)
        info = self._clusters[entry.source].read(entry, since)
        if isinstance(info, RunError):
            raise info
        return info


class _Cluster:
    """One cluster and its last response."""

    def __init__(self, settings: ClusterSettings, streams: Sequence[str]) -> None:
        self._settings, self._streams = settings, streams
        self._guard = threading.Lock()
        self._response: _Response | None = None

    def read(self, entry: Entry, since: float) -> StreamInfo | RunError:
        with self._guard:
            response = self._response
            if response is None or response.queried_at < since or entry.label in response.readers:
                response = self._response = _Response(time.monotonic(), self._query())
            response.readers.add(entry.label)
            return response.infos[entry.stream]

    def _query(self) -> dict[str, StreamInfo | RunError]:
        try:
            with Cluster(self._settings, "sr-assets sensors") as cluster:
                return cluster.stream_infos(self._streams)
        except RunError as error:
            return dict.fromkeys(self._streams, error)
