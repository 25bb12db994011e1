"""Following a feed's stream directly: every advisory, and every told state of a node, as it is stored, in order and once.

New messages are read as a sequence range, so that a lost connection or a recreated stream needs no repair. It writes
nothing.
"""

from dataclasses import dataclass, field
from itertools import chain

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.wire import Connection, read_confirmed
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.received import Advisory, SitePaths
from sr_assets.settings import FeedSettings, Start
from sr_assets.stages.source.position import first_sequence


@dataclass(slots=True)
class Follower:
    """A follower of one feed; `lookback_ns` is the start in ns before now, or None for now."""

    feed: FeedSettings
    lookback_ns: int | None = None
    _created_ns: int | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    _cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self._cluster = Cluster(self.feed.source, "sr-assets follow")

    def poll(self) -> list[tuple[Advisory, int]]:
        """Return the advisories stored since the last call, each with its stored time (unix ns). Raises RunError.

        A node's event that tells its state counts as an advisory, as in `global_advisories`.
        """
        source = self._cluster.stream_info(self.feed.stream)
        if source.created_ns != self._created_ns:
            self._next = self._begin(source)
            self._created_ns = source.created_ns
        fresh = SequenceRange(self._next, max(self._next, source.last_sequence + 1))
        if not len(fresh):
            return []
        paths = SitePaths(self.feed.paths)
        with Connection(self.feed.source, "sr-assets follow") as connection:
            lists = read_confirmed(
                connection,
                self.feed.stream,
                fresh,
                filter_subject=self.feed.filter_subject,
                direct=source.supports_batched_direct_get,
            )
            received = [(paths.told_state(message), message.stored_ns) for message in chain.from_iterable(lists)]
        self._next = fresh.next
        return [(advisory, stored_ns) for advisory, stored_ns in received if advisory is not None]

    def close(self) -> None:
        """Close the connection."""
        self._cluster.close()

    def _begin(self, source: StreamInfo) -> int:
        if self._created_ns is not None:
            return max(1, source.first_sequence)
        start = Start("end") if self.lookback_ns is None else Start("delta", self.lookback_ns)
        return first_sequence(self._cluster, start, source)
