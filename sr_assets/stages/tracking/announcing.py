"""The decisions of the rules of operators on a stream's recorded transitions, once their order is complete."""

from collections.abc import Sequence
from typing import Final

from sr_assets.adapters.state.maintenance import added_windows
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import event_id
from sr_assets.domain.tracking.announcements import Rules
from sr_assets.domain.tracking.maintenance import suppression
from sr_assets.domain.tracking.outages import Outage
from sr_assets.settings import StreamSettings
from sr_assets.stages.tracking.guarding import watch_outages

#: Number of nodes decided in one transaction.
DECIDED_AT_ONCE: Final = 20_000


def operator_rules(store: SiteState, stream: StreamSettings, outages: Sequence[Outage] = ()) -> Rules:
    """Return a stream's rules: the configured ones, and the windows that operators added. Raises RunError."""
    windows = (*stream.windows, *added_windows(store.folder))
    return Rules(windows, stream.guard, outages, stream.flapping_rule, stream.recover_after_ns, stream.muted_classes)


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
