"""The announcement of transitions: which of a node's recorded transitions are announced, and when.

All rules of operators decide here, on event times alone, and none of them changes a status. Add such a rule here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from sr_assets.domain.tracking.maintenance import Window, suppression
from sr_assets.domain.tracking.outages import Guard, Outage
from sr_assets.domain.tracking.rules import Event

_DOWN: Final = (Event.TIMEOUT, Event.EXPIRE)


@dataclass(frozen=True, slots=True)
class Flapping:
    """A node flaps with this number of transitions within a time."""

    transitions: int
    within_ns: int


class NodeEvent(StrEnum):
    """An event of a node that is not a transition: the beginning and end of its flapping, and an undone retirement."""

    FLAPPING = "flapping"
    SETTLED = "settled"
    UNRETIRED = "unretired"


class NodeReport(NamedTuple):
    """A node's event, with the number of its transitions since the beginning of the flapping, if any, and its status."""

    event: NodeEvent
    event_ns: int
    transitions: int | None
    up: bool


@dataclass(slots=True)
class Flap:
    """A node's flapping: its last transition, and the number of its transitions."""

    last_ns: int
    transitions: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a stream's operators, and the outages that the guard has found until now.

    Transitions of the `muted` classes are never announced.
    """

    windows: Sequence[Window] = ()
    guard: Guard | None = None
    outages: Sequence[Outage] = ()
    flapping: Flapping | None = None
    recover_after_ns: int = 0
    muted: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        """Whether any rule can delay or suppress an announcement."""
        return bool(self.windows or self.guard or self.flapping or self.recover_after_ns)

    def hold(self, event: Event, at_ns: int, node_class: str | None) -> tuple[str, int] | None:
        """Return the id of the outage that holds a transition, and until when, or None."""
        if self.guard is not None and event in _DOWN:
            for outage in self.outages:
                if outage.holds(self.guard, at_ns):
                    return outage.id, outage.held_until_ns(self.guard, node_class)
        return None


@dataclass(slots=True)
class Recorded:
    """A recorded transition and the decision of the rules; it waits until all of its times, if it has any.

    `waits_ns` is the time of a `recover` that must last, or the time at which a flapping node settles.
    """

    event_id: str
    event: Event
    event_ns: int
    suppressed_by: str | None = None
    suppressed_until_ns: int | None = None
    held_by: str | None = None
    held_until_ns: int | None = None
    waits_ns: int | None = None
    node_class: str | None = None
    announced: bool = False

    @property
    def waits_until_ns(self) -> int | None:
        """The next time at which a rule decides about the transition, or None if none delays it."""
        times_ns = (self.suppressed_until_ns, self.held_until_ns, self.waits_ns)
        return min((ns for ns in times_ns if ns is not None), default=None)

    @property
    def blocked(self) -> bool:
        """Whether a window or an outage delays the transition."""
        return self.suppressed_until_ns is not None or self.held_until_ns is not None

    def drop(self) -> None:
        """Decide finally not to announce the transition."""
        self.suppressed_until_ns = self.held_until_ns = self.waits_ns = None


@dataclass(slots=True)
class NodeAnnouncements:
    """A node's transitions without a final decision, in order: first the delayed ones, then the `unseen` ones.

    `up` is the status before the transitions that no rule has seen, `told_up` the status that was told last, by an
    announcement or by `settled` or `unretired` of a node that is up. `recent` are the times of its last transitions except
    `new`, `flap` its flapping, `reports` the events found.
    """

    node: str
    up: bool
    told_up: bool
    delayed: list[Recorded] = field(default_factory=list)
    unseen: list[Recorded] = field(default_factory=list)
    recent: list[int] = field(default_factory=list)
    flap: Flap | None = None
    reports: list[NodeReport] = field(default_factory=list)

    def decide(self, rules: Rules, until_ns: int) -> list[Recorded]:
        """Decide on all transitions before `until_ns`, in order of time; return those with a decision or a delay.

        Every transition before `until_ns` must be among `unseen`. The result does not depend on earlier calls.
        """
        decided = [*self.delayed, *(each for each in self.unseen if each.event_ns < until_ns)]
        while self.unseen and self.unseen[0].event_ns < until_ns:
            transition = self.unseen.pop(0)
            self._pass(rules, transition.event_ns, transition.event_ns - 1)
            self._see(rules, transition)
            self.up = transition.event not in _DOWN
        self._pass(rules, until_ns - 1, until_ns - 1)
        return decided

    def _see(self, rules: Rules, transition: Recorded) -> None:
        at_ns, event = transition.event_ns, transition.event
        count = self._count(rules, event, at_ns)
        returns_unnoticed = self._delay(rules, transition)
        cancels = event is Event.TIMEOUT and self._drop(lambda each: each.event is Event.RECOVER and each.waits_ns)
        if self.flap is not None:
            self.flap.last_ns, self.flap.transitions = at_ns, self.flap.transitions + (event is not Event.NEW)
            self._flap(rules, transition)
        elif transition.node_class in rules.muted:
            transition.drop()
        elif (
            rules.flapping
            and count >= rules.flapping.transitions
            and event is not Event.NEW
            and not (transition.blocked or returns_unnoticed)
        ):
            self.flap = Flap(at_ns, count)
            self.reports.append(NodeReport(NodeEvent.FLAPPING, at_ns, count, event not in _DOWN))
            self._flap(rules, transition)
        elif transition.blocked:
            self.delayed.append(transition)
        elif event is Event.RECOVER and rules.recover_after_ns and not returns_unnoticed:
            transition.waits_ns = at_ns + rules.recover_after_ns
            self.delayed.append(transition)
        elif not (returns_unnoticed or cancels):
            self._announce(transition)

    def _count(self, rules: Rules, event: Event, at_ns: int) -> int:
        """Return the number of transitions until a time within the flapping's time, this one included."""
        if rules.flapping is None:
            return 0
        since_ns = at_ns - rules.flapping.within_ns
        self.recent = [ns for ns in self.recent if ns > since_ns]
        if event is not Event.NEW:
            self.recent.append(at_ns)
        return len(self.recent)

    def _delay(self, rules: Rules, transition: Recorded) -> bool:
        """Delay a transition by a window or an outage; return whether it ends an unannounced silence."""
        event, at_ns, node_class = transition.event, transition.event_ns, transition.node_class
        if window := suppression(rules.windows, self.node, node_class, event, at_ns):
            transition.suppressed_by, transition.suppressed_until_ns = window
        held = [each for each in self.delayed if each.held_until_ns is not None]
        if event in _DOWN:
            # An expiry waits for the held timeout before it.
            hold = (held[-1].held_by, held[-1].held_until_ns) if held else rules.hold(event, at_ns, node_class)
            if hold:
                transition.held_by, transition.held_until_ns = hold
        elif self._drop(lambda each: each.held_until_ns is not None) and self.told_up:
            transition.drop()
            return True
        return False

    def _flap(self, rules: Rules, transition: Recorded) -> None:
        """Replace a transition of a flapping node: only its last silence is announced when it settles."""
        self._drop(lambda each: each.waits_ns is not None and not each.blocked)
        if transition.node_class in rules.muted:
            transition.drop()
        elif transition.event in _DOWN:
            transition.waits_ns = self.settles_ns(rules)
            self.delayed.append(transition)
        elif transition.blocked:
            self.delayed.append(transition)

    def settles_ns(self, rules: Rules) -> int | None:
        """Return when the node settles without another transition, or None if it does not flap."""
        if self.flap is None:
            return None
        return self.flap.last_ns + (rules.flapping.within_ns if rules.flapping else 0)

    def _drop(self, which: Callable[[Recorded], object]) -> bool:
        """Drop delayed transitions; return whether there were any."""
        dropped = [each for each in self.delayed if which(each)]
        self.delayed = [each for each in self.delayed if not which(each)]
        for each in dropped:
            each.drop()
        return bool(dropped)

    def _announce(self, transition: Recorded) -> None:
        transition.announced = True
        self.told_up = transition.event not in _DOWN

    def _pass(self, rules: Rules, now_ns: int, settled_ns: int) -> None:
        """Let time pass until `now_ns`: a window, a hold or the wait of a `recover` may end.

        A flapping node settles until `settled_ns`, because a transition at the same time prevents that.
        """
        while True:
            ends = [end for each in self.delayed for end in self._ends(each) if end <= now_ns]
            settles_ns = self.settles_ns(rules)
            if settles_ns is not None and settles_ns <= settled_ns and settles_ns < min(ends, default=settles_ns + 1):
                self._settle(settles_ns)
            elif ends:
                self._end(min(ends))
            else:
                break
        for each in self.delayed:
            if each.waits_ns is not None and each.event in _DOWN:
                each.waits_ns = self.settles_ns(rules)

    def _ends(self, transition: Recorded) -> Iterator[int]:
        """Yield the times of a transition's delays, except that of a flapping."""
        if transition.suppressed_until_ns is not None:
            yield transition.suppressed_until_ns
        if transition.held_until_ns is not None:
            yield transition.held_until_ns
        if transition.waits_ns is not None and (transition.event not in _DOWN or self.flap is None):
            yield transition.waits_ns

    def _settle(self, at_ns: int) -> None:
        assert self.flap is not None
        self.reports.append(NodeReport(NodeEvent.SETTLED, at_ns, self.flap.transitions, self.up))
        self.flap = None
        # `settled` of a node that is up tells its status, as its last silence does of another.
        self.told_up |= self.up
        replaced = [each for each in self.delayed if each.waits_ns is not None and each.event in _DOWN]
        for each in replaced:
            each.waits_ns = None
        self._announce_free(replaced)

    def _end(self, end_ns: int) -> None:
        """End the delays of a time."""
        of_window = [each for each in self.delayed if each.suppressed_until_ns == end_ns]
        for each in self.delayed:
            each.suppressed_until_ns = None if each.suppressed_until_ns == end_ns else each.suppressed_until_ns
            each.held_until_ns = None if each.held_until_ns == end_ns else each.held_until_ns
            if each.event not in _DOWN or self.flap is None:
                each.waits_ns = None if each.waits_ns == end_ns else each.waits_ns
        self._announce_free(of_window)

    def _announce_free(self, together: Sequence[Recorded]) -> None:
        """Announce the transitions that nothing delays any longer; of those `together` only the last, if it is true."""
        free = [each for each in self.delayed if each.waits_until_ns is None]
        self.delayed = [each for each in self.delayed if each.waits_until_ns is not None]
        for each in free:
            is_true = each is together[-1] and not self.up and each.event in _DOWN if together else False
            if is_true or not any(each is other for other in together):
                self._announce(each)
