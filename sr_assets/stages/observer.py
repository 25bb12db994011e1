"""A site's word that it watches: `observer_alive`, for those who go by its advisories and must not trust its silence.

At most once a minute for each stream that announces transitions, and at least once a run. Not here: what it looks like
(`domain.advisories`), what a centre makes of it (`adapters.global_tables`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from sr_assets.domain.advisories import observer_alive
from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport

_EVERY_SECONDS = 60.0
#: How long a run may take from being asked for to its first word.
_START_NS = 30_000_000_000


def say_alive(site: Site, stream: StreamSettings, report: StreamReport, *, busy: bool = False) -> None:
    """Say once more that the stream is watched, unless that was less than a minute ago.

    A run that is `busy` waits a minute with its first word too: it would tell the lag of its beginning. The word goes into
    JetStream where a stream takes the subject, else to whoever listens. One that does not get through is no failure of the
    stream: the next one tells as much.
    """
    advisory, state = stream.advisory, report.state
    before = report.alive_at or (report.began_at if busy else None)
    spoken = before is not None and time.monotonic() - before < _EVERY_SECONDS
    if advisory is None or state is None or spoken:
        return
    report.alive_at = time.monotonic()
    now_ns = site.now_ns()
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
        next_within_ns=_next_within_ns(site, stream, state.watermark_ns),
    )
    subject = advisory.observer_subject
    with contextlib.suppress(SrAssetsError):
        cluster = site.cluster(stream.source if advisory.cluster == "source" else stream.target)
        if advisory.reliable is not False and cluster.stream_names(subject):
            cluster.publish_many([(subject, body, f"observer_alive/{stream.replicator}/{stream.label}/{now_ns}")])
        else:
            cluster.publish_core([(subject, body)])


def _next_within_ns(site: Site, stream: StreamSettings, watermark_ns: int | None) -> int | None:
    """Return how soon the next word comes at the latest: within a run in a minute; after it with the next run, which the
    first node's deadline brings about if no message does. None when nobody is left to be waited for.
    """
    deadline_ns = site.state.next_deadline(stream.stream)
    if deadline_ns is None:
        return None
    run_ns = min(int(_EVERY_SECONDS * 1e9), site.settings.run_budget_ns)
    until_due_ns = max(0, deadline_ns - (watermark_ns or deadline_ns))
    return run_ns + until_due_ns + 2 * site.settings.sensor.interval_ns + _START_NS
