"""The announcement of transitions: which of a node's recorded transitions are announced, and when.

All rules of operators decide here, on event times alone, and none of them changes a status. Add such a rule here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sr_assets.domain.tracking.maintenance import Window, suppression
from sr_assets.domain.tracking.outages import Guard, Outage
from sr_assets.domain.tracking.rules import Event


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a stream's operators, and the outages that the guard has found until now."""

    windows: Sequence[Window] = ()
    guard: Guard | None = None
    outages: Sequence[Outage] = ()

    @property
    def active(self) -> bool:
        """Whether any rule can delay or suppress an announcement."""
        return bool(self.windows or self.guard)

    def hold(self, event: Event, at_ns: int) -> tuple[str, int] | None:
        """Return the id of the outage that holds a transition, and until when, or None."""
        if self.guard is not None and event in (Event.TIMEOUT, Event.EXPIRE):
            for outage in self.outages:
                if outage.holds(self.guard, at_ns):
                    return outage.id, outage.held_until_ns(self.guard)
        return None


@dataclass(slots=True)
class Recorded:
    """A recorded transition and the decision of the rules; it waits until both of its times, if it has any."""

    event_id: str
    event: Event
    event_ns: int
    suppressed_by: str | None = None
    suppressed_until_ns: int | None = None
    held_by: str | None = None
    held_until_ns: int | None = None
    announced: bool = False

    @property
    def waits_until_ns(self) -> int | None:
        """The next time at which a rule decides about the transition, or None if none delays it."""
        return min((ns for ns in (self.suppressed_until_ns, self.held_until_ns) if ns is not None), default=None)


@dataclass(slots=True)
class NodeAnnouncements:
    """A node's transitions without a final decision, in order: the delayed ones, then those that no rule has seen yet.

    `up` is the status before the transitions that no rule has seen, `told_up` the status that was announced last.
    """

    node: str
    up: bool
    told_up: bool
    delayed: list[Recorded] = field(default_factory=list)
    unseen: list[Recorded] = field(default_factory=list)

    def decide(self, rules: Rules, until_ns: int) -> list[Recorded]:
        """Decide on all transitions before `until_ns`, in order of time; return those with a decision or a delay.

        Every transition before `until_ns` must be among `unseen`. The result does not depend on earlier calls.
        """
        decided = [*self.delayed, *(each for each in self.unseen if each.event_ns < until_ns)]
        while self.unseen and self.unseen[0].event_ns < until_ns:
            transition = self.unseen.pop(0)
            self._end_delays(transition.event_ns)
            self._see(rules, transition)
            self.up = transition.event in (Event.NEW, Event.RECOVER)
        self._end_delays(until_ns - 1)
        return decided

    def _see(self, rules: Rules, transition: Recorded) -> None:
        window = suppression(rules.windows, self.node, transition.event, transition.event_ns)
        held = [each for each in self.delayed if each.held_until_ns is not None]
        if window:
            transition.suppressed_by, transition.suppressed_until_ns = window
        if transition.event in (Event.TIMEOUT, Event.EXPIRE):
            # An expiry waits for the held timeout before it.
            hold = (
                (held[-1].held_by, held[-1].held_until_ns)
                if held
                else rules.hold(transition.event, transition.event_ns)
            )
            if hold:
                transition.held_by, transition.held_until_ns = hold
        elif held:
            # The node is back: nobody was told that it was away.
            self.delayed = [each for each in self.delayed if each.held_until_ns is None]
            for each in held:
                each.suppressed_until_ns = each.held_until_ns = None
            if self.told_up:
                transition.suppressed_until_ns = None
                return
        if transition.waits_until_ns is None:
            self._announce(transition)
        else:
            self.delayed.append(transition)

    def _announce(self, transition: Recorded) -> None:
        transition.announced = True
        self.told_up = transition.event in (Event.NEW, Event.RECOVER)

    def _end_delays(self, now_ns: int) -> None:
        """Let time pass until `now_ns`: a window or a hold may end."""
        while ends := [end for each in self.delayed if (end := each.waits_until_ns) is not None and end <= now_ns]:
            end_ns = min(ends)
            of_window = [each for each in self.delayed if each.suppressed_until_ns == end_ns]
            for each in self.delayed:
                each.suppressed_until_ns = None if each.suppressed_until_ns == end_ns else each.suppressed_until_ns
                each.held_until_ns = None if each.held_until_ns == end_ns else each.held_until_ns
            ended = [each for each in self.delayed if each.waits_until_ns is None]
            self.delayed = [each for each in self.delayed if each.waits_until_ns is not None]
            for each in ended:
                # Of a window, only the last transition is announced; of an outage, all of them.
                if not any(each is other for other in of_window) or (
                    each is of_window[-1] and not self.up and each.event != Event.RECOVER
                ):
                    self._announce(each)
