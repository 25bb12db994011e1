"""The announcement of transitions that a maintenance window suppressed."""

from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.tracking.maintenance import suppression
from sr_assets.settings import StreamSettings


def follow_windows(store: SiteState, stream: StreamSettings) -> None:
    """Recompute the ends of the windows of suppressed transitions, because the configuration may have changed them.

    A transition whose window was removed is no longer suppressed.
    """
    outbox = store.outbox(stream.stream)
    ends_ns = {}
    for event_id, node, event, event_ns, until_ns in outbox.suppressed():
        end = suppression(stream.windows, node, event, event_ns)
        if until_ns != (now_until_ns := end[1] if end else event_ns):
            ends_ns[event_id] = now_until_ns
    if ends_ns:
        with store.transaction():
            outbox.move_end(ends_ns)


def end_maintenance(store: SiteState, stream: StreamSettings, swept_ns: int) -> None:
    """Announce the nodes that are not up at the end of their window; every node was swept until `swept_ns`."""
    outbox = store.outbox(stream.stream)
    if any(until_ns <= swept_ns for *_, until_ns in outbox.suppressed()):
        with store.transaction():
            outbox.end_suppression(swept_ns, announce=stream.advisory is not None)
