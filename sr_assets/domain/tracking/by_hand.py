"""Retiring a sender by hand, and undoing it: `retire` and `unretire`.

Call them at a watermark, with every message until then folded.
"""

from dataclasses import replace

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.rules import NodeState, Policy, Status, Transition, expire_at, sweep


def retire(
    policy: Policy, state: NodeState, now_ns: int, blind: BlindSpans
) -> tuple[NodeState, tuple[Transition, ...]]:
    """Retire a sender with one `expire` at `now_ns`, after the transitions of its silence until then.

    A sender that its own silence has retired until then gets no further transition.
    """
    state, transitions = sweep(policy, state, now_ns, blind)
    if state.status is Status.RETIRED:
        return state, transitions
    state, expired = expire_at(state, max(now_ns, state.seen_ns, state.status_since_ns))
    return state, (*transitions, expired)


def unretire(policy: Policy, state: NodeState, now_ns: int, blind: BlindSpans) -> NodeState | None:
    """Return a retired sender with the status of its silence at `now_ns`, or None if it would be retired again.

    Its counters stay, and its next message is copied, because the last copy is unknown.
    """
    silence_ns = now_ns - state.seen_ns - blind.blind_ns(state.seen_ns, now_ns)
    if silence_ns > policy.interval_ns:
        return None
    status = Status.TIMEOUT if silence_ns > policy.warning_ns else Status.UP
    # At a watermark that has not moved, a second `retire` still has another time, and therefore another id.
    since_ns = max(now_ns, state.status_since_ns + 1)
    return replace(state, status=status, status_since_ns=since_ns, retired_at_ns=None)
