"""The advisories of a fleet as they are stored, or as the published tables date them if no stream takes them."""

from collections.abc import Iterator
from typing import NamedTuple, Self

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.received import LIFE_CYCLE, Advisory, read_message
from sr_assets.domain.subjects import advisory_pattern
from sr_assets.measure.stream_log import StreamLog
from sr_assets.measure.tables import Published
from sr_assets.settings import StreamSettings


class Announced(NamedTuple):
    """An advisory of a node: the times of the event and of its publication (unix ns).

    In version 1, the event's time is rounded down to a second.
    """

    event_id: str
    node: str
    event: str
    event_ns: int
    at_ns: int


class AdvisoryLog:
    """A reader of the advisories of one stream's nodes; a context manager."""

    def __init__(self, entry: StreamSettings) -> None:
        self._entry, self._log = entry, _log_of(entry)
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.__exit__()

    @property
    def needs_tables(self) -> bool:
        """Whether no stream takes the advisories, so that only the tables show them."""
        return self._log is None

    def poll(self, published: Published | None) -> Iterator[Announced]:
        """Yield the advisories since the last call; `published` is a new publication."""
        if self._log is None:
            for row in published.advisories if published else ():
                if row[0] not in self._known:
                    self._known.add(row[0])
                    yield Announced(*row)
            return
        for message in self._log.poll():
            advisory = read_message(message.payload, message.stored_ns)
            if isinstance(advisory, Advisory) and advisory.stream in ("", self._entry.stream):
                event = LIFE_CYCLE[advisory.event_code]
                yield Announced(advisory.event_id, advisory.node, event, advisory.event_ns, message.stored_ns)


def _log_of(entry: StreamSettings) -> StreamLog | None:
    cluster, advisory = entry.advisory_cluster, entry.advisory
    if cluster is None or advisory is None:
        return None
    with Cluster(cluster, "sr-assets measure") as admin:
        streams = admin.stream_names(advisory_pattern(advisory.subject))
    return StreamLog(cluster, streams[0]) if streams else None
