"""The announcement of transitions: which of a node's recorded transitions are announced, and when.

All rules of operators decide here, on event times alone, and none of them changes a status. Add such a rule here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sr_assets.domain.tracking.maintenance import Window, suppression
from sr_assets.domain.tracking.rules import Event


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a stream's operators."""

    windows: Sequence[Window] = ()

    @property
    def active(self) -> bool:
        """Whether any rule can delay or suppress an announcement."""
        return bool(self.windows)


@dataclass(slots=True)
class Recorded:
    """A recorded transition and the decision of the rules; one with `suppressed_until_ns` waits until then."""

    event_id: str
    event: Event
    event_ns: int
    suppressed_by: str | None = None
    suppressed_until_ns: int | None = None
    announced: bool = False

    @property
    def waits_until_ns(self) -> int | None:
        """The next time at which a rule decides about the transition, or None if none has delayed it."""
        return self.suppressed_until_ns


@dataclass(slots=True)
class NodeAnnouncements:
    """A node's transitions without a final decision, in order: the delayed ones, then those that no rule has seen yet.

    `up` is the status before the transitions that no rule has seen.
    """

    node: str
    up: bool
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
        if window:
            transition.suppressed_by, transition.suppressed_until_ns = window
            self.delayed.append(transition)
        else:
            transition.announced = True

    def _end_delays(self, now_ns: int) -> None:
        """Let time pass until `now_ns`: announce the last transition of an ended window if the node is not up."""
        while ends := [end for each in self.delayed if (end := each.waits_until_ns) is not None and end <= now_ns]:
            end_ns = min(ends)
            ended = [each for each in self.delayed if each.suppressed_until_ns == end_ns]
            for transition in ended:
                transition.suppressed_until_ns = None
                self.delayed.remove(transition)
            if not self.up and ended[-1].event is not Event.RECOVER:
                ended[-1].announced = True
