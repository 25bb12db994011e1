"""Outages: their limits, and which transitions of nodes an outage holds; `outage_guard` finds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

#: Shares are whole numbers of this.
WHOLE: Final = 1_000_000


class SiteEvent(StrEnum):
    """A change of a site: a large share of its nodes is silent, or reports again."""

    PARTIAL = "partial"
    DARK = "dark"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Guard:
    """The limits of an outage: shares in millionths, durations in ns; `warning_ns` is the stream's.

    `classes` has the `quiet_ns` and `warning_ns` of each class of nodes.
    """

    partial: int
    dark: int
    quiet_ns: int
    hold_ns: int
    min_nodes: int
    warning_ns: int
    classes: dict[str | None, tuple[int, int]] = field(default_factory=dict)

    def quiet_of(self, node_class: str | None) -> int:
        """Return after which silence a node of a class is silent."""
        return self.classes.get(node_class, (self.quiet_ns, self.warning_ns))[0]

    def warning_of(self, node_class: str | None) -> int:
        """Return the `warn_duration` of a class."""
        return self.classes.get(node_class, (self.quiet_ns, self.warning_ns))[1]


@dataclass(frozen=True, slots=True)
class Outage:
    """An outage of a stream from its first event on; `ended_ns` is None while it runs."""

    id: str
    began_ns: int
    since_ns: int
    dark: bool = False
    ended_ns: int | None = None

    def held_until_ns(self, guard: Guard, node_class: str | None) -> int:
        """Return when a held transition of a class is announced if its node stays silent."""
        limit_ns = self.began_ns + guard.hold_ns
        return limit_ns if self.ended_ns is None else min(limit_ns, self.ended_ns + guard.warning_of(node_class))

    def holds(self, guard: Guard, at_ns: int) -> bool:
        """Return whether the outage holds a timeout or an expiry of a time."""
        until_ns = self.began_ns + guard.hold_ns
        return self.began_ns <= at_ns < (until_ns if self.ended_ns is None else min(until_ns, self.ended_ns))


@dataclass(frozen=True, slots=True)
class SiteReport:
    """A site event: the number of watched and silent nodes, and the earliest last sighting of a silent one."""

    event: SiteEvent
    event_ns: int
    nodes: int
    silent: int
    since_ns: int
