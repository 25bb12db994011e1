"""The fold: a sender's state and a sighting (or the passing of time) become a new state, a decision and transitions.

These rules of sampling and availability use integer nanoseconds of the source's stored times, and no clock.
"""

import hashlib
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Final

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.positions import SECOND_NS


class Status(StrEnum):
    """The status of a sender."""

    UP = "up"
    TIMEOUT = "timeout"
    RETIRED = "retired"


class Event(StrEnum):
    """A change of a sender's status."""

    NEW = "new"
    TIMEOUT = "timeout"
    RECOVER = "recover"
    EXPIRE = "expire"


class Reason(StrEnum):
    """The reason to copy or skip a message; `all` belongs to streams without sampling."""

    TOO_OLD = "too_old"
    NEW = "new"
    FORCED = "forced"
    SIZE = "size"
    INTERVAL = "interval"
    SAMPLED = "sampled"
    NO_SENDER = "no_sender"
    HEARTBEAT = "heartbeat"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Policy:
    """The sampling of a stream, and the silence limits of its senders: `warning_ns` for timeout, `interval_ns` for
    retirement.

    `size_trigger_bytes` 0 is off. Raises ValueError unless 0 < warning_ns < interval_ns and size_trigger_bytes >= 0.
    """

    interval_ns: int
    warning_ns: int
    size_trigger_bytes: int = 0
    due_ns: int = field(init=False, repr=False)
    """Interval minus tolerance; minus a sender's splay, it is the time from one copy to the next."""

    def __post_init__(self) -> None:
        """Check the bounds once, so that the fold need not."""
        if not 0 < self.warning_ns < self.interval_ns:
            raise ValueError(
                f"warning {self.warning_ns} ns must be above 0 and below the interval {self.interval_ns} ns"
            )
        if self.size_trigger_bytes < 0:
            raise ValueError(f"size trigger {self.size_trigger_bytes} must not be negative")
        object.__setattr__(self, "due_ns", self.interval_ns - tolerance_ns(self.interval_ns))


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of a sender; `transition` counts its transitions from 1 and continues when it returns."""

    first_seen_ns: int
    seen_ns: int
    sequence: int
    copied_ns: int | None
    copied_bytes: int | None
    status: Status
    status_since_ns: int
    retired_at_ns: int | None
    times_retired: int
    transition: int


#: The state of a sender, as columns.
NODE_COLUMNS: Final = tuple(column.name for column in fields(NodeState))


@dataclass(frozen=True, slots=True)
class Sighting:
    """One message of a sender, reduced to the inputs of the rules."""

    sequence: int
    stored_ns: int
    payload_bytes: int
    forced: bool


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a sender's status; the event determines the sighting of `seen_ns`, `age_ns` and `sequence`.

    new: this one. timeout and expire: the last one. recover: `seen_ns` is the one before the silence, `sequence` this
    one.
    """

    event: Event
    event_ns: int
    seen_ns: int
    age_ns: int
    sequence: int
    previous: Status | None
    transition: int
    returned: bool
    outage_ns: int | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to copy or skip a message, and its reason."""

    copy: bool
    reason: Reason


TOO_OLD = Decision(False, Reason.TOO_OLD)
NEW = Decision(True, Reason.NEW)
FORCED = Decision(True, Reason.FORCED)
SIZE = Decision(True, Reason.SIZE)
INTERVAL = Decision(True, Reason.INTERVAL)
SAMPLED = Decision(False, Reason.SAMPLED)
NO_SENDER = Decision(True, Reason.NO_SENDER)
HEARTBEAT = Decision(True, Reason.HEARTBEAT)
ALL = Decision(True, Reason.ALL)

# Module constants, because enum attribute access is slow in the hot loop.
_UP, _TIMEOUT, _RETIRED = Status.UP, Status.TIMEOUT, Status.RETIRED


def tolerance_ns(interval_ns: int) -> int:
    """How much early a message may be and still count as one interval later: 1 s, or a tenth of an interval below 10 s."""
    return interval_ns // 10 if interval_ns < 10 * SECOND_NS else SECOND_NS


def splay_ns(sender: str, interval_ns: int) -> int:
    """Return how much earlier a sender's copies are due, to spread a fleet's copies; an argument of `sight`.

    Up to a tenth of the interval, constant for a sender.
    """
    share = int.from_bytes(hashlib.blake2b(sender.encode()).digest()[:8], "big")
    return interval_ns * share // (10 << 64)


def deadline_ns(policy: Policy, state: NodeState, blind: BlindSpans) -> int | None:
    """Return the last instant at which `sweep` has no effect, or None if it never has one.

    A stored deadline is valid until the policy changes. More blind spans only delay it: a sweep at a deadline stored
    before them has no effect.
    """
    if state.status is _RETIRED:
        return None
    return blind.exceeds_at_ns(state.seen_ns, policy.warning_ns if state.status is _UP else policy.interval_ns)


def sweep(policy: Policy, state: NodeState, now_ns: int, blind: BlindSpans) -> tuple[NodeState, tuple[Transition, ...]]:
    """Let time pass until `now_ns`: silence longer than the warning is a timeout, longer than the interval an expiry.

    A silence of exactly the warning or the interval changes nothing. Transitions have the instant at which the limit
    was exceeded. One call returns both if the silence is long enough; a second call for the same silence returns none.
    """
    silence_ns = now_ns - state.seen_ns
    if silence_ns > policy.warning_ns:
        silence_ns -= blind.blind_ns(state.seen_ns, now_ns)
    transitions: tuple[Transition, ...] = ()
    if state.status is _UP and silence_ns > policy.warning_ns:
        state, timed_out = _time_out(policy, state, blind)
        transitions = (timed_out,)
    if state.status is _TIMEOUT and silence_ns > policy.interval_ns:
        state, expired = _expire(policy, state, blind)
        transitions = (*transitions, expired)
    return state, transitions


def sight(
    policy: Policy,
    splay: int,
    state: NodeState | None,
    sighting: Sighting,
    blind: BlindSpans,
    cutoff_ns: int | None = None,
    first_transition: int = 1,
    read_until_ns: int | None = None,
    silence: Policy | None = None,
) -> tuple[NodeState, Decision, tuple[Transition, ...]]:
    """Apply one message of a sender, in sequence order; `state` is None for an unknown or forgotten sender.

    `splay` is the sender's `splay_ns`; `silence` is the policy before the message, if it changes the sender's class. A
    message stored before `cutoff_ns` is too old to copy but still a sighting; a
    message stored until `read_until_ns` is read again because the source was rolled back, and revives no silent or
    retired sender.

    A sighting's time is never before the sender's last sighting or transition, even if a server's clock was set back.
    Silence is swept first, so the result does not depend on earlier sweeps. `blind` are the spans of all batches so
    far, including the sighting's.

    An unknown sender's transitions count from `first_transition`: above the highest number of a forgotten sender of the
    stream, or 1.
    """
    stored_ns = sighting.stored_ns
    at_ns = stored_ns if state is None else max(stored_ns, state.seen_ns, state.status_since_ns)
    transitions: tuple[Transition, ...] = ()
    if state is None:
        state, transitions = _begin(at_ns, sighting.sequence, first_transition)
    elif state.status is not _UP and read_until_ns is not None and stored_ns <= read_until_ns:
        return state, untracked(stored_ns, cutoff_ns, SAMPLED), ()
    elif state.status is not _UP or at_ns - state.seen_ns > (silence or policy).warning_ns:
        state, transitions = _wake(silence or policy, state, at_ns, sighting.sequence, blind)
    copied_ns, copied_bytes = state.copied_ns, state.copied_bytes
    too_old = cutoff_ns is not None and stored_ns < cutoff_ns
    decision = TOO_OLD if too_old else _decide(policy, splay, state, sighting, at_ns)
    if decision.copy:
        copied_ns, copied_bytes = at_ns, sighting.payload_bytes
    # By position instead of `replace`: this is the hot loop.
    seen = NodeState(
        state.first_seen_ns, at_ns, sighting.sequence, copied_ns, copied_bytes, state.status, state.status_since_ns,
        state.retired_at_ns, state.times_retired, state.transition,
    )  # fmt: skip
    return seen, decision, transitions


def _decide(policy: Policy, splay: int, state: NodeState, sighting: Sighting, at_ns: int) -> Decision:
    """Return the first matching rule for a message that is not too old."""
    if state.copied_ns is None or state.copied_bytes is None:
        return NEW
    if sighting.forced:
        return FORCED
    if _size_changed(policy.size_trigger_bytes, state.copied_bytes, sighting.payload_bytes):
        return SIZE
    return INTERVAL if at_ns - state.copied_ns >= policy.due_ns - splay else SAMPLED


def untracked(stored_ns: int, cutoff_ns: int | None, otherwise: Decision = NO_SENDER) -> Decision:
    """Decide on a message without a tracked sender: skip it if too old, else return `otherwise`."""
    return TOO_OLD if cutoff_ns is not None and stored_ns < cutoff_ns else otherwise


def _size_changed(trigger_bytes: int, copied_bytes: int, payload_bytes: int) -> bool:
    """Compare with the last copied size, so that slow growth adds up; a payload after an empty one always counts."""
    return copied_bytes == 0 < payload_bytes or 0 < trigger_bytes <= abs(payload_bytes - copied_bytes)


def _begin(at_ns: int, sequence: int, number: int) -> tuple[NodeState, tuple[Transition, ...]]:
    """Return the state and the transition `new` of an unknown sender at `at_ns`."""
    new = Transition(Event.NEW, at_ns, at_ns, 0, sequence, None, number, False, None)
    return NodeState(at_ns, at_ns, sequence, None, None, _UP, at_ns, None, 0, number), (new,)


def _wake(
    policy: Policy, state: NodeState, at_ns: int, sequence: int, blind: BlindSpans
) -> tuple[NodeState, tuple[Transition, ...]]:
    """Bring a silent or retired sender up at `at_ns`, after the transitions of its silence, if any."""
    state, silence = sweep(policy, state, at_ns, blind)
    if state.status is _UP:
        return state, ()
    away_ns, number = at_ns - state.seen_ns, state.transition + 1
    if state.status is _RETIRED:
        back = Transition(Event.NEW, at_ns, at_ns, 0, sequence, _RETIRED, number, True, away_ns)
    else:
        back = Transition(Event.RECOVER, at_ns, state.seen_ns, away_ns, sequence, _TIMEOUT, number, False, away_ns)
    state = replace(state, status=_UP, status_since_ns=at_ns, retired_at_ns=None, transition=number)
    return state, (*silence, back)


def _time_out(policy: Policy, state: NodeState, blind: BlindSpans) -> tuple[NodeState, Transition]:
    at_ns, number = blind.exceeds_at_ns(state.seen_ns, policy.warning_ns), state.transition + 1
    age_ns = at_ns - state.seen_ns
    event = Transition(Event.TIMEOUT, at_ns, state.seen_ns, age_ns, state.sequence, _UP, number, False, None)
    return replace(state, status=_TIMEOUT, status_since_ns=at_ns, transition=number), event


def _expire(policy: Policy, state: NodeState, blind: BlindSpans) -> tuple[NodeState, Transition]:
    # With a policy shortened since, the interval may have ended before the timeout was noticed.
    return expire_at(state, max(blind.exceeds_at_ns(state.seen_ns, policy.interval_ns), state.status_since_ns))


def expire_at(state: NodeState, at_ns: int) -> tuple[NodeState, Transition]:
    """Retire a sender at `at_ns`."""
    age_ns, number = at_ns - state.seen_ns, state.transition + 1
    event = Transition(Event.EXPIRE, at_ns, state.seen_ns, age_ns, state.sequence, state.status, number, False, None)
    times, state = state.times_retired + 1, replace(state, copied_ns=None, copied_bytes=None, transition=number)
    return replace(state, status=_RETIRED, status_since_ns=at_ns, retired_at_ns=at_ns, times_retired=times), event


def retire(
    policy: Policy, state: NodeState, now_ns: int, blind: BlindSpans
) -> tuple[NodeState, tuple[Transition, ...]]:
    """Retire a sender with one `expire` at `now_ns`, after the transitions of its silence until then.

    A sender that its own silence has retired until then gets no further transition.
    """
    state, transitions = sweep(policy, state, now_ns, blind)
    if state.status is Status.RETIRED:
        return state, transitions
    # After a clock was set back, the watermark may not have moved: a return at the same instant would have the id of an
    # earlier `new`.
    state, expired = expire_at(state, max(now_ns, state.seen_ns + 1, state.status_since_ns + 1))
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
