"""A site's heartbeat `observer_alive`, which proves to readers of its advisories that the site still watches its nodes.

Each stream that announces transitions sends it at most once a minute, and once per run unless the previous run's
heartbeat is still valid; a run after a failed one always sends one. It announces the maximum time until the next one:
until the first node's deadline, which starts a run even without messages, plus `heartbeat_grace_ns`. Without a deadline
it announces none.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from sr_assets.domain.advisories import observer_alive
from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.settings import Settings, StreamSettings
    from sr_assets.stages.clock import Clock
    from sr_assets.stages.report import StreamReport

_EVERY_SECONDS: Final = 60.0
_EVERY_NS: Final = 60_000_000_000
#: Maximum time from the request of a run to its first heartbeat.
_START_NS: Final = 30_000_000_000


def heartbeat_grace_ns(settings: Settings) -> int:
    """Return the maximum delay of a due run's heartbeat: two sensor intervals, 30 s to start, up to a minute of work."""
    return min(_EVERY_NS, settings.run_budget_ns) + 2 * settings.sensor.interval_ns + _START_NS


class HeartbeatStage:
    """The heartbeat of one stream with an `advisory` block in one run; `grace_ns` is `heartbeat_grace_ns`."""

    def __init__(
        self, stream: StreamSettings, store: SiteState, clock: Clock, grace_ns: int, report: StreamReport
    ) -> None:
        assert stream.advisory is not None
        self._stream, self._advisory = stream, stream.advisory
        self._nodes, self._clock, self._grace_ns, self._report = store.nodes(stream.stream), clock, grace_ns, report
        # Whether an error preceded the next heartbeat: the first successful step clears it from the state.
        state = store.load_stream(stream.stream)
        self._failed = state is not None and state.last_error is not None

    def send(self, cluster: Cluster, *, busy: bool = False) -> None:
        """Send a heartbeat unless the last one is less than a minute old.

        A `busy` run delays its first one by a minute too, because it would report the initial lag. If the last
        heartbeat is overdue, the run only waits until it has caught up, because readers do not trust its advisories
        before.

        JetStream stores it if a stream takes the subject; else current subscribers receive it. A failure to send does
        not fail the stream: the next heartbeat replaces it.
        """
        report, state = self._report, self._report.state
        if state is None:
            return
        self._failed |= state.last_error is not None
        waits = busy and not (self._overdue(state) and not state.lag_messages)
        before = report.alive_at or (report.began_at if waits else None)
        if before is not None and time.monotonic() - before < _EVERY_SECONDS:
            return
        now_ns, deadline_ns = self._clock.now_ns(), self._nodes.next_deadline()
        due_ns = None if deadline_ns is None else now_ns + max(0, deadline_ns - (state.watermark_ns or deadline_ns))
        report.alive_at = time.monotonic()
        if not self._failed and _still_holds(state, now_ns, due_ns):
            return
        self._failed = False
        report.alive_ns, report.alive_due_ns = now_ns, due_ns
        self._publish(cluster, self._body(state, now_ns, due_ns), now_ns)

    def _body(self, state: StreamState, now_ns: int, due_ns: int | None) -> bytes:
        return observer_alive(
            replicator=self._stream.replicator,
            name=self._stream.name,
            stream=self._stream.stream,
            ts_ns=now_ns,
            watermark_ns=state.watermark_ns,
            position=state.next_sequence - 1,
            lag_messages=state.lag_messages,
            lag_ns=state.lag_ns,
            nodes=self._nodes.count(),
            epoch_ns=state.epoch_ns,
            next_within_ns=None if due_ns is None else due_ns - now_ns + self._grace_ns,
        )

    def _publish(self, cluster: Cluster, body: bytes, now_ns: int) -> None:
        subject = self._advisory.observer_subject
        with contextlib.suppress(SrAssetsError):
            if self._advisory.reliable is not False and cluster.stream_names(subject):
                message_id = f"observer_alive/{self._stream.replicator}/{self._stream.label}/{now_ns}"
                cluster.publish_many([(subject, body, message_id)])
            else:
                cluster.publish_core([(subject, body)])

    def _overdue(self, state: StreamState) -> bool:
        return state.alive_due_ns is not None and self._clock.now_ns() > state.alive_due_ns + self._grace_ns


def _still_holds(state: StreamState, now_ns: int, due_ns: int | None) -> bool:
    """Return whether the last heartbeat, of this run or a successful earlier one, is recent and its announcement still
    holds.

    A run without new messages then sends none: if the advisory stream is itself copied, each heartbeat would start
    another run.
    """
    if state.alive_ns is None or now_ns - state.alive_ns >= _EVERY_NS:
        return False
    if due_ns is None or state.alive_due_ns is None:
        return due_ns == state.alive_due_ns
    return due_ns <= state.alive_due_ns + _START_NS // 2
