"""The decisions of the rules of operators on a stream's recorded transitions, once their order is complete."""

from typing import Final

from sr_assets.adapters.state.maintenance import added_windows
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.tracking.announcements import Rules
from sr_assets.domain.tracking.maintenance import suppression
from sr_assets.settings import StreamSettings

#: Number of nodes decided in one transaction.
DECIDED_AT_ONCE: Final = 20_000


def operator_rules(store: SiteState, stream: StreamSettings) -> Rules:
    """Return a stream's rules: the configured ones, and the windows that operators added. Raises RunError."""
    return Rules((*stream.windows, *added_windows(store.folder)))


def decide_announcements(
    store: SiteState, stream: StreamSettings, watermark_ns: int, at_once: int = DECIDED_AT_ONCE
) -> bool:
    """Decide on the transitions before the watermark, after every node is swept until then; return whether any was due.

    Each portion of `at_once` nodes is one transaction.
    """
    undecided = store.undecided(stream.stream)
    first_ns = undecided.next_due()
    if first_ns is None:
        return False
    rules, decided = operator_rules(store, stream), False
    _follow_windows(store, stream, rules)
    while nodes := undecided.due(watermark_ns, at_once):
        transitions = [each for node in nodes for each in node.decide(rules, watermark_ns)]
        with store.transaction():
            undecided.save(transitions, watermark_ns, publish=stream.advisory is not None)
        decided = True
    return decided


def _follow_windows(store: SiteState, stream: StreamSettings, rules: Rules) -> None:
    """Recompute the ends of the windows of suppressed transitions: a window may have been ended, removed or prolonged."""
    undecided, moved = store.undecided(stream.stream), []
    for node in undecided.suppressed():
        for each in node.delayed:
            if each.suppressed_until_ns is None:
                continue
            window = suppression(rules.windows, node.node, each.event, each.event_ns)
            # The transition of a removed window waits no longer.
            until_ns = window[1] if window else each.event_ns
            if until_ns != each.suppressed_until_ns:
                each.suppressed_until_ns = until_ns
                moved.append(each)
    if moved:
        with store.transaction():
            undecided.save(moved, None, publish=False)
