"""The lanes of a partitioned stream during a run: their beginning after a change of the partitions, and their lag."""

import contextlib
import logging
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published import queries
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Lane
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import StreamSettings
from sr_assets.stages.connections import Clusters

logger = logging.getLogger(__name__)

#: Counting takes two requests a lane.
_COUNT_SECONDS: Final = 10.0


class LaneRows:
    """Keeps the partitions of one stream in the state up to date. All lanes are at the stream's position."""

    def __init__(self, stream: StreamSettings) -> None:
        self._stream = stream
        self._due = 0.0

    def update(self, store: SiteState, clusters: Clusters, *, final: bool = False) -> None:
        """Store the lanes and their lag, counted at most every ten seconds; `final` counts in any case.

        Changed lanes begin after the messages that the source holds now. Raises RunError if it does not respond then.
        """
        stream = self._stream
        known = store.partitions(stream.stream).lanes()
        if not (known or stream.lanes):
            return
        state = store.load_stream(stream.stream)
        starts = state.starts if state else 0
        # After a restart the sequences are those of another source.
        changed = [(lane.subject, lane.starts) for lane in known] != [(subject, starts) for subject in stream.lanes]
        if not (changed or final or times.monotonic() >= self._due):
            return
        self._due = times.monotonic() + _COUNT_SECONDS
        begins = self._begin(store, clusters, known, state) if changed else known[0].begins
        lanes = [Lane(subject, lag, begins, starts) for subject, lag in self._lag(state, clusters).items()]
        if lanes != known:
            with store.transaction():
                store.partitions(stream.stream).replace(lanes)

    def _begin(self, store: SiteState, clusters: Clusters, known: list[Lane], state: StreamState | None) -> int:
        """Return the sequence at which changed lanes begin: 0 for the first lanes of a stream.

        They stay the first ones after a restart; later ones need not take all messages of a source that was rolled back.
        """
        stream = self._stream
        is_first = not known and not (state and state.has_position)
        if is_first or (known and not known[0].begins and tuple(lane.subject for lane in known) == stream.lanes):
            return 0
        intent = store.open_intent(stream.stream)
        last = clusters.connect(stream.source).stream_info(stream.stream).last_sequence
        begins = max(last + 1, state.next_sequence if state else 0, intent.next if intent else 0)
        logger.info(
            "%s: changing partitions from %s to %s at sequence %d",
            stream.label,
            ", ".join(lane.subject for lane in known) or "none",
            ", ".join(stream.lanes) or "none",
            begins,
        )
        return begins

    def _lag(self, state: StreamState | None, clusters: Clusters) -> dict[str, int | None]:
        """Return the lag of each lane by its filter, in order."""
        stream = self._stream
        if state is not None and not state.lag_messages:
            return dict.fromkeys(stream.lanes, 0)
        lag: dict[str, int | None] = dict.fromkeys(stream.lanes)
        if state is not None and state.has_position:
            with contextlib.suppress(SrAssetsError):
                cluster = clusters.connect(stream.source)
                for subject in stream.lanes:
                    lag[subject] = cluster.count_from(stream.stream, state.next_sequence, subject)
        return lag


def lanes_begin(home: Path, stream: StreamSettings, source: StreamInfo) -> int:
    """Return the sequence at which the configured lanes of a stream begin, as far as the published tables show.

    It is after the source's last message if the next run changes the lanes, and 0 for a stream without an earlier run.
    """
    name, after = {"name": stream.name, "stream": stream.stream}, source.last_sequence + 1
    where = "WHERE name = $name AND stream = $stream"
    with contextlib.suppress(SrAssetsError):  # nothing is published yet, or by an earlier version
        lanes = queries.ask(
            home, f"SELECT subject, begins FROM replication_partitions {where} ORDER BY partition", name
        ).values
        if tuple(subject for subject, _ in lanes) == stream.lanes:
            # Those of an earlier source may be higher.
            return int(lanes[0][1]) if lanes[0][1] <= after else 0
        if lanes or queries.ask(home, f"SELECT 1 FROM replication {where} AND next_sequence > 0", name).values:
            return after
    return 0
