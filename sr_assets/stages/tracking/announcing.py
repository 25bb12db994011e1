"""The decisions of the rules of operators and of the outage guard on transitions, once their order is complete."""

import logging
from collections.abc import Sequence
from typing import Any, Final

from sr_assets.adapters.state.operator_settings import added_windows
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import event_id
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.announcements import Rules
from sr_assets.domain.tracking.maintenance import suppression
from sr_assets.domain.tracking.outage_guard import watch
from sr_assets.domain.tracking.outages import Outage, SiteEvent, SiteReport
from sr_assets.settings import StreamSettings

logger = logging.getLogger(__name__)
#: Number of nodes decided in one transaction.
DECIDED_AT_ONCE: Final = 20_000


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


def operator_rules(store: SiteState, stream: StreamSettings, outages: Sequence[Outage] = ()) -> Rules:
    """Return a stream's rules: the configured ones, and the windows that operators added. Raises RunError."""
    windows = (*stream.windows, *added_windows(store.folder))
    recover_after_ns = stream.recover_after_ns or 0
    return Rules(windows, stream.guard, outages, stream.flapping_rule, recover_after_ns, stream.muted_classes)


def decide_announcements(
    store: SiteState, stream: StreamSettings, state: StreamState, at_once: int = DECIDED_AT_ONCE
) -> bool:
    """Decide on the transitions before the committed watermark, after every node is swept until then.

    Return whether any was due. Each portion of `at_once` nodes is one transaction.
    """
    outages, undecided, watermark_ns = (
        watch_outages(store, stream, state),
        store.undecided(stream.stream),
        state.watermark_ns,
    )
    if watermark_ns is None or not undecided.any():
        return False
    rules, decided = operator_rules(store, stream, outages), False
    _follow_windows(store, stream, rules)
    _follow_outages(store, stream, rules)
    identity, publish = (stream.replicator, stream.name, stream.stream), stream.advisory is not None
    while nodes := undecided.due(watermark_ns, rules, at_once):
        transitions = [each for node in nodes for each in node.decide(rules, watermark_ns)]
        reports = [
            (event_id(*identity, node.node, report.event, report.event_ns), node.node, report)
            for node in nodes
            for report in node.reports
        ]
        with store.transaction():
            undecided.save(transitions, watermark_ns, publish=publish)
            undecided.save_flapping(nodes, rules)
            undecided.report(reports, state.epoch_ns, watermark_ns, publish=publish)
        decided = True
    return decided


def _follow_outages(store: SiteState, stream: StreamSettings, rules: Rules) -> None:
    """Recompute the ends of holds: an outage has ended, or the configuration has changed."""
    undecided = store.undecided(stream.stream)
    if not (holding := undecided.held_by()):
        return
    guard, known = rules.guard, {outage.id: outage for outage in rules.outages}
    with store.transaction():
        for outage_id, node_class in holding:
            outage = known.get(outage_id)
            until_ns = outage.held_until_ns(guard, node_class) if outage and guard else None
            undecided.move_holds(outage_id, node_class, until_ns)


def _follow_windows(store: SiteState, stream: StreamSettings, rules: Rules) -> None:
    """Recompute the ends of the windows of suppressed transitions: a window may have been ended, removed or prolonged."""
    undecided, moved = store.undecided(stream.stream), []
    # A run reads the suppressed transitions once, and again when the windows change.
    if store.followed_windows.get(stream.stream) == rules.windows:
        return
    for node in undecided.suppressed():
        for each in node.delayed:
            if each.suppressed_until_ns is None:
                continue
            window = suppression(rules.windows, node.node, each.node_class, each.event, each.event_ns)
            # The transition of a removed window waits no longer.
            until_ns = window[1] if window else each.event_ns
            if until_ns != each.suppressed_until_ns:
                each.suppressed_until_ns = until_ns
                moved.append(each)
    if moved:
        with store.transaction():
            undecided.save(moved, None, publish=False)
    store.followed_windows[stream.stream] = rules.windows
