"""The lanes of a partitioned stream during a run: their lag, and a change of their number or filters."""

import contextlib
import logging
import time
from typing import Final

from sr_assets.adapters.state.partitions import Lane
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import StreamSettings
from sr_assets.stages.connections import Clusters

logger = logging.getLogger(__name__)

#: Counting takes two requests a lane.
_COUNT_SECONDS: Final = 10.0


class LaneLag:
    """Keeps the partitions of one stream in the state up to date. All lanes are at the stream's position."""

    def __init__(self, stream: StreamSettings) -> None:
        self._stream = stream
        self._due = 0.0

    def note(self, store: SiteState, clusters: Clusters, *, final: bool = False) -> None:
        """Store the lanes and their lag, counted at most every ten seconds; `final` counts in any case.

        Without a response of the source, the lag is unknown.
        """
        stream = self._stream
        known = store.partitions(stream.stream).lanes()
        state = store.load_stream(stream.stream)
        if not (known or stream.lanes) or state is None or not state.has_position:
            return
        before = [lane.subject for lane in known]
        changed = before != list(stream.lanes)
        if changed and before:
            logger.info(
                "%s: changing partitions from %s to %s at sequence %d",
                stream.label,
                ", ".join(before),
                ", ".join(stream.lanes) or "none",
                state.next_sequence,
            )
        if not (changed or final or time.monotonic() >= self._due):
            return
        self._due = time.monotonic() + _COUNT_SECONDS
        lanes = self._measured(state, clusters)
        if lanes != known:
            with store.transaction():
                store.partitions(stream.stream).replace(lanes)

    def _measured(self, state: StreamState, clusters: Clusters) -> list[Lane]:
        stream = self._stream
        if not state.lag_messages:
            return [Lane(subject, 0) for subject in stream.lanes]
        with contextlib.suppress(SrAssetsError):
            cluster = clusters.connect(stream.source)
            counts = [cluster.count_from(stream.stream, state.next_sequence, subject) for subject in stream.lanes]
            return [Lane(*lane) for lane in zip(stream.lanes, counts, strict=True)]
        return [Lane(subject, None) for subject in stream.lanes]
