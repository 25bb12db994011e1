"""The outage guard of a stream: site events, from the sightings and timeouts before the watermark."""

import logging
from typing import Any

from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import event_id
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.outages import Outage, SiteEvent, SiteReport, watch
from sr_assets.settings import StreamSettings

logger = logging.getLogger(__name__)


def watch_outages(store: SiteState, stream: StreamSettings, state: StreamState) -> list[Outage]:
    """Watch until the committed watermark, and return all outages; the last one may run.

    Every node must be swept until then. Queries no server.
    """
    rows, guard, until_ns = store.guard(stream.stream), stream.guard, state.watermark_ns
    from_ns = rows.watched_ns()
    if until_ns is None or (guard is None and from_ns is None):
        return rows.outages()
    outages = rows.outages()
    outage = outages[-1] if outages and outages[-1].ended_ns is None else None
    reports: list[tuple[SiteReport, Outage]] = []
    if guard is None:
        reports = _close(outage, until_ns, rows.last_event()) if outage else []
    elif from_ns is not None and from_ns < until_ns and (outage is not None or not rows.quiet(from_ns, until_ns)):
        blind = BlindSpans(tuple(store.nodes(stream.stream).blind_spans()))
        watched = rows.watched(guard, outage, from_ns, until_ns)
        reports = watch(guard, outage, watched, from_ns, until_ns, blind)
    if guard is not None and from_ns is not None and from_ns >= until_ns:
        return outages
    with store.transaction():
        rows.report(
            _with_ids(stream, outage, reports),
            epoch_ns=state.epoch_ns,
            detected_ns=until_ns,
            publish=stream.advisory is not None,
        )
        if guard is None:
            rows.end()
        elif from_ns is None:
            rows.begin(until_ns)
        else:
            rows.move(until_ns)
    for report, _ in reports:
        logger.warning("%s: %s: %d of %d nodes are silent", stream.label, report.event, report.silent, report.nodes)
    return rows.outages() if reports else outages


def _with_ids(
    stream: StreamSettings, outage: Outage | None, reports: list[tuple[SiteReport, Outage]]
) -> list[tuple[str, str, SiteReport]]:
    """Return each report with its id and its outage's id, which is that of the outage's first event."""
    identity, outage_id, rows = (stream.replicator, stream.name, stream.stream), outage.id if outage else "", []
    for report, after in reports:
        report_id = event_id(*identity, "", report.event, report.event_ns)
        if report.event_ns == after.began_ns:
            outage_id = report_id
        rows.append((report_id, outage_id, report))
    return rows


def _close(outage: Outage, at_ns: int, last: dict[str, Any]) -> list[tuple[SiteReport, Outage]]:
    """End the outage of a stream whose guard was removed, with the counts of its last event."""
    return [(SiteReport(SiteEvent.RESTORED, at_ns, last["nodes"], last["silent"], outage.since_ns), outage)]
