"""A live tail of a feed, straight from its stream: every advisory as it is stored, in order and once.

It goes by sequence like every reader here: what is new is asked for and read as a range, so a lost connection or a stream
made again needs no state to be mended. Nothing is written. Not here: what is printed (`cli`), the fold (`advisory_feed`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.wire import Connection, read_confirmed
from sr_assets.domain.availability import Advisory, read_message
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import Start
from sr_assets.stages.source.position import first_sequence

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.settings import FeedSettings


@dataclass(slots=True)
class Follower:
    """Where a tail of one feed stands; `since_ns` is how far back it begins, None for now."""

    feed: FeedSettings
    since_ns: int | None = None
    _created_ns: int | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    _cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        """Open nothing before it is asked for."""
        self._cluster = Cluster(self.feed.source, "sr-assets tail")

    def poll(self) -> list[tuple[Advisory, int]]:
        """Return the advisories that came since, with the times (unix ns) they were stored at. Raises RunError."""
        source = self._cluster.stream_info(self.feed.stream)
        if source.created_ns != self._created_ns:
            self._next = self._begin(source)
            self._created_ns = source.created_ns
        fresh = SequenceRange(self._next, max(self._next, source.last_sequence + 1))
        if not len(fresh):
            return []
        with Connection(self.feed.source, "sr-assets tail") as connection:
            lists = read_confirmed(
                connection,
                self.feed.stream,
                fresh,
                filter_subject=self.feed.filter_subject,
                direct=source.supports_batched_direct_get,
            )
            found = [(read_message(one.payload, one.stored_ns), one.stored_ns) for one in chain.from_iterable(lists)]
        self._next = fresh.next
        return [(told, stored_ns) for told, stored_ns in found if isinstance(told, Advisory)]

    def close(self) -> None:
        """Close the connection."""
        self._cluster.close()

    def _begin(self, source: StreamInfo) -> int:
        if self._created_ns is not None:
            return max(1, source.first_sequence)
        start = Start("end") if self.since_ns is None else Start("delta", self.since_ns)
        return first_sequence(self._cluster, start, source)
