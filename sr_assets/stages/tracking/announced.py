"""Advisories that are stored although the outbox still holds them: a crash came before their commit, or this state is an
older one, such as a checkpoint or a restored backup.

An advisory's message id is computed from its event, so that the streams prove the publication, however short their
duplicate windows are.
"""

import logging
from collections.abc import Iterator
from typing import Final

from sr_assets.adapters import wire
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import published_id
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, Message, header_values
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.received import Advisory, read_message
from sr_assets.settings import StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.source.position import sequence_at

logger = logging.getLogger(__name__)

#: The clocks of source and advisory stream may differ by less than this: a clock further ahead is not believed.
_CLOCKS_NS: Final = 3_600_000_000_000


class StoredAdvisories:
    """One stream's stored advisories; each run reads them once, from the outbox's earliest event on."""

    def __init__(self, stream: StreamSettings, store: SiteState, clock: Clock) -> None:
        self._stream, self._store, self._clock = stream, store, clock
        self._outbox = store.outbox(stream.stream)
        self._outbox.note_waiting()
        self._read_from_ns: int | None = None
        # Whether stored advisories may match later rows, and the time before which retention has deleted some.
        self._left = False
        self._dropped_before_ns = 0

    def settle(self, cluster: Cluster, pattern: str) -> None:
        """Mark the stored advisories in the outbox as published."""
        earliest_ns = self._outbox.earliest_ns()
        if earliest_ns is None:
            return
        if self._read_from_ns is None or earliest_ns < self._read_from_ns:
            try:
                self._read(cluster, pattern, earliest_ns)
            except RunError as error:
                if isinstance(error, TransientError) and not isinstance(error, wire.DeniedError):
                    raise
                logger.warning("%s: cannot read the stored advisories: %s", self._stream.label, error)
        if self._left:
            with self._store.transaction():
                self._left = self._outbox.count_stored(self._dropped_before_ns, self._clock.now_ns())

    def _read(self, cluster: Cluster, pattern: str, since_ns: int) -> None:
        """Note the ids of the advisories stored since a time (unix ns)."""
        same_clock = cluster.settings == self._stream.source
        self._read_from_ns, self._left, firsts_ns = since_ns, False, []
        self._outbox.forget_stored()
        for keeper in cluster.stream_names(pattern):
            info = cluster.stream_info(keeper)
            first = sequence_at(cluster, info, since_ns - (1_000_000_000 if same_clock else _CLOCKS_NS))
            held = SequenceRange(first, max(first, info.last_sequence + 1))
            if info.first_sequence > 1 and (oldest := cluster.next_message(keeper, info.first_sequence)):
                firsts_ns.append(oldest.stored_ns)
            with wire.Connection(cluster.settings, "sr-assets advisories") as connection:
                for messages in wire.read_confirmed(connection, keeper, held, filter_subject=pattern, direct=False):
                    self._outbox.note_stored([row for message in messages for row in self._rows(message)])
                    self._left = True
        if self._left and (count := self._outbox.later_stored()):
            # A later state of this site has published events that this one neither knows nor has deleted.
            self._dropped_before_ns = max(self._dropped_before_ns, min(firsts_ns, default=0))
            logger.warning(
                "%s: %d advisories were published after this state; they are not sent again", self._stream.label, count
            )

    def _rows(self, message: Message) -> Iterator[tuple[str, int, int | None]]:
        """Yield an advisory's id, its stored time, and its event's time if it names this stream."""
        ids = header_values(message.headers, MESSAGE_ID_HEADER)
        if ids:
            advisory = read_message(message.payload, message.stored_ns)
            ours = self._stream.replicator, self._stream.name, self._stream.stream
            event_ns = advisory.event_ns if isinstance(advisory, Advisory) and advisory[:3] == ours else None
            yield published_id(ids[-1]), message.stored_ns, event_ns
