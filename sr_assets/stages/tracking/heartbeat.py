"""A site's word that it watches: `observer_alive`, for those who go by its advisories and must not trust its silence.

At most once a minute for each stream that announces transitions, and once a run unless the run before has just said the
same; a run after one that failed always says it, to those who have waited in vain. What is promised is the next word:
within a run it comes in a minute; after it with the next run, which the first node's deadline brings about if no message
does; with no node left to wait for, nothing is promised. Not here: what it looks like (`domain.advisories`), what a centre
makes of it (`adapters.state.global_view`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from sr_assets.domain.advisories import observer_alive
from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport

_EVERY_SECONDS = 60.0
#: How long a run may take from being asked for to its first word.
_START_NS = 30_000_000_000


def send_heartbeat(site: Site, stream: StreamSettings, report: StreamReport, *, busy: bool = False) -> None:
    """Say once more that the stream is watched, unless that was less than a minute ago.

    A run that is `busy` waits a minute with its first word too: it would tell the lag of its beginning. Where the last
    word's promise was broken it waits only until it is level: nobody believes its advisories before. The word goes into
    JetStream where a stream takes the subject, else to whoever listens. One that does not get through is no failure of the
    stream: the next one tells as much.
    """
    advisory, state = stream.advisory, report.state
    if advisory is None or state is None:
        return
    waits = busy and not (_overdue(site, state) and not state.lag_messages)
    before = report.alive_at or (report.began_at if waits else None)
    if before is not None and time.monotonic() - before < _EVERY_SECONDS:
        return
    now_ns, deadline_ns = site.now_ns(), site.state.next_deadline(stream.stream)
    due_ns = None if deadline_ns is None else now_ns + max(0, deadline_ns - (state.watermark_ns or deadline_ns))
    report.alive_at = time.monotonic()
    if _still_holds(state, now_ns, due_ns):
        return
    report.alive_ns, report.alive_due_ns = now_ns, due_ns
    body = observer_alive(
        replicator=stream.replicator,
        name=stream.name,
        stream=stream.stream,
        ts_ns=now_ns,
        watermark_ns=state.watermark_ns,
        position=state.next_sequence - 1,
        lag_messages=state.lag_messages,
        lag_ns=state.lag_ns,
        nodes=site.state.count_nodes(stream.stream),
        next_within_ns=None if due_ns is None else due_ns - now_ns + _grace_ns(site),
    )
    subject = advisory.observer_subject
    with contextlib.suppress(SrAssetsError):
        cluster = site.cluster(stream.source if advisory.cluster == "source" else stream.target)
        if advisory.reliable is not False and cluster.stream_names(subject):
            cluster.publish_many([(subject, body, f"observer_alive/{stream.replicator}/{stream.label}/{now_ns}")])
        else:
            cluster.publish_core([(subject, body)])


def _overdue(site: Site, state: StreamState) -> bool:
    return state.alive_due_ns is not None and site.now_ns() > state.alive_due_ns + _grace_ns(site)


def _still_holds(state: StreamState, now_ns: int, due_ns: int | None) -> bool:
    """Tell whether the last word, of this run or one before that went well, is fresh and promised the next run in time.

    A run that found nothing new then has nothing to say: where the advisory stream is itself copied, its word would be
    what the next run is asked for, for ever.
    """
    if state.last_error is not None or state.alive_ns is None or now_ns - state.alive_ns >= _EVERY_SECONDS * 1e9:
        return False
    if due_ns is None or state.alive_due_ns is None:
        return due_ns == state.alive_due_ns
    return due_ns <= state.alive_due_ns + _START_NS // 2


def _grace_ns(site: Site) -> int:
    """Return how much later than a run is due its word may come: it is asked for by a sensor, and at work for a while."""
    run_ns = min(int(_EVERY_SECONDS * 1e9), site.settings.run_budget_ns)
    return run_ns + 2 * site.settings.sensor.interval_ns + _START_NS
