"""The stream infos that the sensors of many sites share: each cluster is asked once for all of them.

Here: when to ask again. Not here: the question (`adapters.nats`), what follows from the answer (`observing`).
"""

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
class _Look:
    """What a cluster said of its streams, to a question of `taken_at` (monotonic), and which entries have had it."""

    taken_at: float
    infos: dict[str, StreamInfo | RunError]
    answered: set[str] = field(default_factory=set)


class StreamInfoCache:
    """The last look at each cluster that some entries are read from; several threads may use it.

    A look answers each entry once, so that whoever asks again gets a new one: the ticks of one round of all sensors
    share one look.
    """

    def __init__(self, entries: Sequence[Entry], longest_seconds: float) -> None:
        """Take the entries that share looks, and how old a look may be."""
        streams: dict[ClusterSettings, dict[str, None]] = defaultdict(dict)
        for entry in entries:
            streams[entry.source][entry.stream] = None
        self._clusters = {cluster: _Cluster(cluster, list(names)) for cluster, names in streams.items()}
        self._longest_seconds = longest_seconds

    def stream_info(self, entry: Entry, since: float) -> StreamInfo:
        """Return the info of an entry's source, asked for not before `since` (monotonic).

        Raises RunError when the cluster or the stream cannot be asked.
        """
        since = max(since, time.monotonic() - self._longest_seconds)
        info = self._clusters[entry.source].answer(entry, since)
        if isinstance(info, RunError):
            raise info
        return info


class _Cluster:
    """One cluster and the last look at it."""

    def __init__(self, settings: ClusterSettings, streams: Sequence[str]) -> None:
        self._settings, self._streams = settings, streams
        self._guard = threading.Lock()
        self._look: _Look | None = None

    def answer(self, entry: Entry, since: float) -> StreamInfo | RunError:
        with self._guard:
            look = self._look
            if look is None or look.taken_at < since or entry.label in look.answered:
                look = self._look = _Look(time.monotonic(), self._ask())
            look.answered.add(entry.label)
            return look.infos[entry.stream]

    def _ask(self) -> dict[str, StreamInfo | RunError]:
        try:
            with Cluster(self._settings, "sr-assets sensors") as cluster:
                return cluster.stream_infos(self._streams)
        except RunError as error:
            return dict.fromkeys(self._streams, error)
